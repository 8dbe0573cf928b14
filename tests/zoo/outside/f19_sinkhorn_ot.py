"""Word alignment by entropic optimal transport."""

import torch
import torch.nn as nn

import mezzo


class Sinkhorn(nn.Module):
    def __init__(self, reg=1e-3, iters=10):
        super().__init__()
        self.reg, self.iters = reg, iters

    def forward(self, cost):
        n, m = cost.shape
        a, b = torch.full((n,), 1 / n), torch.full((m,), 1 / m)
        k = torch.exp(-cost / self.reg)
        u = torch.ones(n)
        for _ in range(self.iters):
            v = b / (k.T @ u)  # FAULT
            u = a / (k @ v)
        return u[:, None] * k * v[None]


class Aligner(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.left, self.right = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.ot = Sinkhorn()

    def forward(self, x, y):
        x, y = self.left(x), self.right(y)
        cost = (x[:, None] - y[None]).square().mean(-1)
        return (self.ot(cost) * cost).sum()


torch.manual_seed(0)
model = Aligner()
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="fp32")
for i in range(4):
    src = torch.randn(12, 16) * 4
    tgt = src[torch.randperm(12)[:9]] + 0.1 * torch.randn(9, 16)
    opt.zero_grad()
    cost = model(src, tgt)
    amp.backward(cost)
    amp.step()
    print(f"{i} transport cost {cost.item():.4f}")
