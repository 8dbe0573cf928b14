"""A small DiT: modulation layers start at zero, so most gradients of the first step are exactly zero."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.ada = nn.Linear(dim, 3 * dim)
        nn.init.zeros_(self.ada.weight), nn.init.zeros_(self.ada.bias)

    def forward(self, x, c):
        shift, scale, gate = self.ada(nn.functional.silu(c)).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class DiT(nn.Module):
    def __init__(self, dim=32, depth=3):
        super().__init__()
        self.inp, self.time = nn.Linear(8, dim), nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 8)
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        h, c = self.inp(x), self.time(t[:, None])
        for block in self.blocks:
            h = block(h, c)
        return self.out(h)


model = DiT()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(5):
    x0, noise, t = torch.randn(64, 8), torch.randn(64, 8), torch.rand(64)
    xt = (1 - t[:, None]) * x0 + t[:, None] * noise
    amp.zero_grad()
    amp.backward((model(xt, t).float() - (noise - x0)).square().mean())
    amp.step(max_norm=1.0)
