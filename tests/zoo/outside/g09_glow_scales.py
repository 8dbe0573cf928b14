"""Glow-like flow with an unbounded affine coupling, in fp16."""

import torch
import torch.nn as nn

import mezzo


class Coupling(nn.Module):
    def __init__(self, dim, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim // 2, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        a, b = x.chunk(2, -1)
        log_s, t = self.net(a).chunk(2, -1)
        return torch.cat([b * torch.exp(log_s) + t, a], -1), log_s.sum(-1)  # FAULT


class Glow(nn.Module):
    def __init__(self, dim=6, depth=2):
        super().__init__()
        self.flows = nn.ModuleList(Coupling(dim) for _ in range(depth))

    def forward(self, x):
        total = 0
        for flow in self.flows:
            x, ld = flow(x)
            total = total + ld
        return x, total


def fit(steps=4):
    torch.manual_seed(6)
    model = Glow()
    with torch.no_grad():
        model.flows[1].net[2].bias[:3] = 11.5  # resumed from a run in fp32
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    amp = mezzo.prepare(model, opt, policy="fp16, scaling.init_scale=4")
    for i in range(steps):
        z, logdet = model(torch.randn(64, 6))
        nll = (1e-10 * z.square().sum(-1) - logdet).mean()
        opt.zero_grad()
        amp.backward(nll)
        amp.step()
        print(i, nll.item())


fit()
