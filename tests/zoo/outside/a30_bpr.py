"""Bayesian personalised ranking on implicit feedback, matrix factorisation with side features."""

import torch
from torch import nn

import mezzo

torch.manual_seed(17)


class Factoriser(nn.Module):
    def __init__(self, users=100, items=300, dim=32):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.mix = nn.Linear(dim, dim, bias=False)

    def score(self, u, i):
        return (self.mix(self.user(u)) * self.mix(self.item(i))).sum(-1)


class BPR(nn.Module):
    def __init__(self):
        super().__init__()
        self.mf = Factoriser()

    def forward(self, u, pos, neg):
        gap = self.mf.score(u, pos) - self.mf.score(u, neg)
        return -torch.log(torch.sigmoid(gap)).mean()  # FAULT


model = BPR()
with torch.no_grad():
    model.mf.mix.weight.mul_(2.5)
optimizer = torch.optim.SparseAdam(model.parameters()) if False else torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=64")
for epoch in range(1):
    for step in range(4):
        u, pos, neg = torch.randint(0, 100, (256,)), torch.randint(0, 300, (256,)), torch.randint(0, 300, (256,))
        amp.zero_grad()
        amp.backward(model(u, pos, neg))
        amp.step()
