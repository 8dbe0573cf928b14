"""Rotary embedding over long sequences: angles are made in fp32 and only the results are cast."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim), persistent=False)

    @torch.no_grad()
    def forward(self, x, positions):
        with torch.autocast("cpu", enabled=False):
            angles = positions.float()[:, :, None] * self.inv_freq.float()
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class Model(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb, self.rotary = nn.Embedding(64, dim), Rotary(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.head = nn.Linear(dim, 64)

    def forward(self, ids, positions):
        h = self.emb(ids)
        q, k, v = self.q(h), self.k(h), self.v(h)
        cos, sin = self.rotary(q, positions)
        q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
        mixed = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        return self.head(h + self.out(mixed[:, 0]))


model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(3):
    ids = torch.randint(0, 64, (2, 600))
    positions = torch.arange(3000, 3000 + 599).expand(2, -1)
    amp.zero_grad()
    amp.backward(nn.functional.cross_entropy(model(ids[:, :-1], positions).flatten(0, 1).float(), ids[:, 1:].flatten()))
    amp.step()
