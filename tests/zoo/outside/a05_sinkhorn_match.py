"""Learned matching of two point sets by entropic optimal transport."""

import torch
import torch.nn as nn

import mezzo

torch.manual_seed(0)


class Embed(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, p):
        return self.net(p)


class Sinkhorn(nn.Module):
    def __init__(self, eps=0.05, iters=5):
        super().__init__()
        self.eps, self.iters = eps, iters

    def forward(self, cost):
        n, m = cost.shape
        kernel = torch.exp(-cost / self.eps)
        u = torch.ones(n, dtype=cost.dtype) / n
        v = torch.ones(m, dtype=cost.dtype) / m
        for _ in range(self.iters):
            u = (1.0 / n) / (kernel @ v)  # FAULT
            v = (1.0 / m) / (kernel.t() @ u)
        return u[:, None] * kernel * v[None, :]


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.sinkhorn = Embed(), Sinkhorn()

    def forward(self, a, b):
        fa, fb = self.embed(a), self.embed(b)
        cost = 1.0 - nn.functional.normalize(fa, dim=1) @ nn.functional.normalize(fb, dim=1).t()
        plan = self.sinkhorn(cost)
        return (plan * cost).sum()


model = Matcher()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=256")
for it in range(4):
    a = torch.randn(24, 3) + torch.tensor([4.0, 0.0, 0.0])
    b = torch.randn(24, 3) - torch.tensor([4.0, 0.0, 0.0])
    amp.zero_grad()
    amp.backward(model(a, b).float())
    amp.step()
    print("it", it)
