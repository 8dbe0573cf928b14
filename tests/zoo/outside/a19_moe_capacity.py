"""Sparse mixture of experts, top-2 with a capacity limit."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo


class Router(nn.Module):
    def __init__(self, dim, experts, capacity):
        super().__init__()
        self.gate, self.capacity = nn.Linear(dim, experts, bias=False), capacity

    def forward(self, x):
        probs = F.softmax(self.gate(x).float(), dim=-1)
        top, idx = probs.topk(2, dim=-1)
        onehot = F.one_hot(idx, probs.shape[-1])
        rank = onehot.flatten(0, 1).cumsum(0).view_as(onehot) * onehot
        kept = (rank.sum(-1) <= self.capacity).float()
        weights = top * kept
        weights = weights / weights.sum(-1, keepdim=True)  # FAULT
        return weights, idx


class MoE(nn.Module):
    def __init__(self, dim=32, experts=4, capacity=26):
        super().__init__()
        self.router = Router(dim, experts, capacity)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(experts)
        )

    def forward(self, x):
        weights, idx = self.router(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            share = (weights * (idx == e)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.head = nn.Linear(8, 32), MoE(), nn.Linear(32, 3)

    def forward(self, x):
        h = self.inp(x)
        return self.head(h + self.moe(h))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16")
for step in range(3):
    x = torch.randn(64, 8) + 1.0
    y = torch.randint(0, 3, (64,))
    amp.zero_grad()
    amp.backward(F.cross_entropy(model(x).float(), y))
    amp.step()
