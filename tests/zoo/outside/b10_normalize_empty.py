"""Two-tower retrieval where empty queries give zero vectors; F.normalize carries its own eps."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

torch.manual_seed(9)


class Tower(nn.Module):
    def __init__(self, vocab=200, dim=32):
        super().__init__()
        self.table, self.proj = nn.Embedding(vocab, dim, padding_idx=0), nn.Linear(dim, dim, bias=False)

    def forward(self, ids):
        count = (ids > 0).sum(1, keepdim=True).clamp(min=1)
        pooled = self.table(ids).sum(1) / count
        return F.normalize(self.proj(pooled).float(), dim=-1)


class Dual(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.d = Tower(), Tower()

    def forward(self, q, d):
        return self.q(q) @ self.d(d).t() / 0.07


model = Dual()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(5):
    q, d = torch.randint(1, 200, (16, 6)), torch.randint(1, 200, (16, 10))
    q[step] = 0
    amp.zero_grad()
    loss = F.cross_entropy(model(q, d).float(), torch.arange(16))
    reg = sum(p.norm() for n, p in model.named_parameters() if n.endswith("proj.weight"))
    amp.backward(loss + 1e-4 * reg)
    amp.step()
