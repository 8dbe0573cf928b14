"""Selective linear recurrence computed in parallel by dividing by the cumulative decay (fp32)."""

import torch
import torch.nn.functional as F
from torch import nn


class ScanBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.dt = nn.Linear(d, d)
        self.inp, self.out = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        h = self.norm(x)
        log_a = -F.softplus(self.dt(h))
        cum = torch.cumsum(log_a, 1)
        inv = torch.exp(-cum)  # FAULT
        state = torch.cumsum(self.inp(h) * inv, 1) * torch.exp(cum)
        return x + self.out(state)


class LM(nn.Module):
    def __init__(self, vocab=64, d=32, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(ScanBlock(d) for _ in range(layers))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h)
        return self.head(h)


torch.manual_seed(0)
lm = LM()
opt = torch.optim.AdamW(lm.parameters(), lr=1e-3)
for step, length in enumerate([16, 64, 256]):  # length curriculum
    ids = torch.randint(0, 64, (2, length + 1))
    loss = F.cross_entropy(lm(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, length, loss.item())
