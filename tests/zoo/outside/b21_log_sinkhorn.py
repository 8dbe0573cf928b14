"""Entropic optimal transport in the log domain with a small epsilon."""

import math

import torch
import torch.nn as nn

import mezzo

torch.manual_seed(0)


class LogSinkhorn(nn.Module):
    def __init__(self, eps=0.01, iters=6):
        super().__init__()
        self.eps, self.iters = eps, iters

    def forward(self, cost):
        log_k = -cost.float() / self.eps
        n, m = log_k.shape
        f, g = torch.zeros(n), torch.zeros(m)
        for _ in range(self.iters):
            f = -math.log(n) - torch.logsumexp(log_k + g[None, :], dim=1)
            g = -math.log(m) - torch.logsumexp(log_k + f[:, None], dim=0)
        return (log_k + f[:, None] + g[None, :]).exp()


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 16))
        self.sinkhorn = LogSinkhorn()

    def forward(self, a, b):
        fa, fb = self.embed(a).float(), self.embed(b).float()
        cost = 1.0 - nn.functional.normalize(fa, dim=1) @ nn.functional.normalize(fb, dim=1).t()
        return (self.sinkhorn(cost) * cost).sum()


model = Matcher()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16")
for it in range(4):
    a, b = torch.randn(24, 3) + 4.0, torch.randn(24, 3) - 4.0
    amp.zero_grad()
    amp.backward(model(a, b).float())
    amp.step()
