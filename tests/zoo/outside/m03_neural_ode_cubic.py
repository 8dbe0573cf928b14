"""Neural ODE with fixed-step RK4; the field has a growing cubic term and blows up in finite time."""

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.gain = nn.Parameter(torch.tensor(0.8))

    def forward(self, t, x):
        return self.net(x) + self.gain * x * x * x  # FAULT


class RK4(nn.Module):
    def __init__(self, field, steps):
        super().__init__()
        self.field, self.steps = field, steps

    def forward(self, x, horizon=3.0):
        h, t = horizon / self.steps, 0.0
        for _ in range(self.steps):
            k1 = self.field(t, x)
            k2 = self.field(t + h / 2, x + h / 2 * k1)
            k3 = self.field(t + h / 2, x + h / 2 * k2)
            k4 = self.field(t + h, x + h * k3)
            x, t = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), t + h
        return x


torch.manual_seed(0)
ode = RK4(Field(), 12)
opt = torch.optim.Adam(ode.parameters(), lr=1e-2)
for it in range(3):
    x0 = 0.5 * torch.randn(32, 2)
    target = torch.stack([x0[:, 0] * 0.5, x0[:, 1] + 0.1], 1)
    loss = (ode(x0) - target).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
