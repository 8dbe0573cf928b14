"""Parametric survival model; some patients have their event on the day of admission."""

import torch
from torch import nn

import mezzo

torch.manual_seed(6)


class WeibullNet(nn.Module):
    def __init__(self, features=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x):
        raw = self.body(x).float()
        return nn.functional.softplus(raw[:, 0]) + 0.1, nn.functional.softplus(raw[:, 1]) + 0.5


def weibull_nll(scale, shape, time, event):
    z = time / scale
    log_hazard = shape.log() - scale.log() + (shape - 1) * torch.log(z)  # FAULT
    return -(event * log_hazard - z.pow(shape)).mean()


def cohort(n, admitted):
    x = torch.randn(n, 8)
    days = torch.randint(1, 400, (n,)).float() / 365
    days[:admitted] = 0.0
    return x, days, (torch.rand(n) < 0.7).float()


model = WeibullNet()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    x, time, event = cohort(64, admitted=3 if step == 1 else 0)
    scale, shape = model(x)
    amp.zero_grad()
    amp.backward(weibull_nll(scale, shape, time, event))
    amp.step()
