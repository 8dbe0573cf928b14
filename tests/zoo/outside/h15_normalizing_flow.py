"""RealNVP with bounded scales, exact log-likelihood in fp32 outside of the model."""

import math

import torch
import torch.nn as nn

import mezzo


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(dim // 2, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, -1)
        s = 2 * torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], -1), s.float().sum(-1)


class Flow(nn.Module):
    def __init__(self, dim=4, hidden=32, depth=4):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(dim, hidden, i % 2 == 1) for i in range(depth))

    def forward(self, x):
        logdet = torch.zeros(len(x))
        for step in self.steps:
            x, ld = step(x)
            logdet = logdet + ld
        return x, logdet


torch.manual_seed(0)
flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
amp = mezzo.prepare(flow, opt, policy="bf16")
for it in range(6):
    x = torch.randn(128, 4) * torch.tensor([1.0, 0.2, 3.0, 1.0])
    opt.zero_grad()
    z, logdet = flow(x)
    nll = 0.5 * z.square().sum(-1) + 2 * math.log(2 * math.pi) - logdet
    amp.backward(nll.mean())
    amp.step()
    print(it, nll.mean().item())
