"""Entropic matching in the log domain, fp32 under a bf16 encoder; eps is small, nothing overflows."""

import math

import torch
from torch import nn


def log_sinkhorn(cost, eps, iters=15):
    n, m = cost.shape
    f, g = torch.zeros(n), torch.zeros(m)
    for _ in range(iters):
        f = -eps * torch.logsumexp((g[None] - cost) / eps - math.log(m), 1)
        g = -eps * torch.logsumexp((f[:, None] - cost) / eps - math.log(n), 0)
    plan = torch.exp((f[:, None] + g[None] - cost) / eps - math.log(n * m))
    return (plan * cost).sum()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 32), nn.Linear(32, 8)

    def forward(self, p):
        return self.b(torch.relu(self.a(p)))


torch.manual_seed(0)
enc = Encoder()
opt = torch.optim.Adam(enc.parameters(), lr=1e-3)
for step in range(3):
    p, q = torch.randn(24, 3), torch.randn(24, 3) + 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = enc(p), enc(q)
    cost = (a.float()[:, None] - b.float()[None]).square().sum(-1)
    loss = log_sinkhorn(cost, 0.01)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
