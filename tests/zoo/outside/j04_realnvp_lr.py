"""RealNVP on two moons; the learning rate is far too high."""

import math

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, z):
        a, b = z.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        b = b * torch.exp(s) + t  # FAULT
        return torch.cat([b, a] if self.flip else [a, b], 1), s.squeeze(1)


class Flow(nn.Module):
    def __init__(self, k=4):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(k))

    def forward(self, x):
        logdet = 0
        for layer in self.layers:
            x, s = layer(x)
            logdet = logdet + s
        return -0.5 * (x**2).sum(1) - math.log(2 * math.pi) + logdet


def moons(n):
    t = torch.rand(n) * math.pi
    return torch.stack([t.cos(), t.sin()], 1) + 0.05 * torch.randn(n, 2)


torch.manual_seed(0)
flow = Flow()
opt = torch.optim.SGD(flow.parameters(), lr=20.0)
for step in range(12):
    loss = -flow(moons(128)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
