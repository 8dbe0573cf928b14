"""Top-1 mixture of experts with a per-expert variance penalty; one expert gets no token."""

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, d=16, experts=4):
        super().__init__()
        self.gate = nn.Linear(d, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d)) for _ in range(experts)
        )
        with torch.no_grad():
            self.gate.bias[3] = -8.0  # a gate that has collapsed

    def forward(self, x):
        prob = F.softmax(self.gate(x), -1)
        top, idx = prob.max(-1)
        y = torch.zeros_like(x)
        reg = x.new_zeros(())
        for e, expert in enumerate(self.experts):
            rows = (idx == e).nonzero().squeeze(1)
            out = expert(x[rows])
            reg = reg + out.pow(2).mean()  # FAULT
            y = y.index_add(0, rows, out * top[rows, None])
        return y, reg


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.moe = MoE()
        self.head = nn.Linear(16, 50)

    def forward(self, ids):
        h = self.embed(ids).flatten(0, 1)
        y, reg = self.moe(h)
        return self.head(h + y), reg


torch.manual_seed(0)
model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    ids = torch.randint(0, 50, (4, 13))
    logits, reg = model(ids[:, :-1])
    loss = F.cross_entropy(logits, ids[:, 1:].flatten()) + 1e-3 * reg
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
