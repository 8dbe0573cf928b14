"""RealNVP density estimation; scale nets without a bounded nonlinearity."""

import torch
from torch import nn

import mezzo


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        half = dim // 2
        self.flip = flip
        self.s = nn.Sequential(nn.Linear(half, 64), nn.ReLU(), nn.Linear(64, half))
        self.t = nn.Sequential(nn.Linear(half, 64), nn.ReLU(), nn.Linear(64, half))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s, t = self.s(a), self.t(a)
        b = b * s.exp() + t  # FAULT
        return torch.cat([b, a] if self.flip else [a, b], dim=1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, dim=8, depth=4):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(dim, i % 2 == 1) for i in range(depth))

    def forward(self, x):
        logdet = torch.zeros(x.shape[0])
        for step in self.steps:
            x, ld = step(x)
            logdet = logdet + ld
        prior = -0.5 * (x.float() ** 2).sum(1)
        return -(prior + logdet).mean()


torch.manual_seed(21)
flow = Flow()
with torch.no_grad():
    flow.steps[3].s[2].bias.fill_(11.4)
opt = torch.optim.Adam(flow.parameters(), lr=1e-4)
amp = mezzo.prepare(flow, opt, "fp16, scaling.init_scale=1")
for step in range(4):
    amp.zero_grad()
    amp.backward(flow(torch.randn(128, 8)))
    amp.step()
