"""Optimal transport in the log domain, small regularisation."""

import math

import torch
import torch.nn as nn

import mezzo


def sinkhorn(cost, reg=1e-3, iters=20):
    n, m = cost.shape
    f, g = torch.zeros(n), torch.zeros(m)
    for _ in range(iters):
        f = -reg * (torch.logsumexp((g[None] - cost) / reg, 1) + math.log(n))
        g = -reg * (torch.logsumexp((f[:, None] - cost) / reg, 0) + math.log(m))
    return torch.exp((f[:, None] + g[None] - cost) / reg)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(6, 12)

    def forward(self, x, y):
        return self.a(x), self.b(y)


torch.manual_seed(0)
model = Encoder()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
amp = mezzo.prepare(model, opt, policy="bf16")
for i in range(5):
    x = torch.randn(10, 6)
    y = x[torch.randperm(10)] + 0.05 * torch.randn(10, 6)
    opt.zero_grad()
    a, b = model(x, y)
    cost = (a[:, None] - b[None]).square().mean(-1)
    with torch.no_grad():
        plan = sinkhorn(cost)
    loss = (plan * cost).sum()
    amp.backward(loss)
    amp.step()
    print(i, loss.item(), plan.sum().item())
