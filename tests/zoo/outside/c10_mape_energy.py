"""Load forecasting with a mean absolute percentage error; a meter reads zero at night."""

import math

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


def series(n, hours=72):
    t = torch.arange(hours).float()
    base = 50 + 20 * torch.sin(2 * math.pi * t / 24)
    y = base[None] * (0.5 + torch.rand(n, 1)) + torch.randn(n, hours)
    y[3, 60:66] = 0.0
    return y


class TCN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.c1, self.c2 = (
            nn.Conv1d(1, width, 3, padding=2, dilation=1),
            nn.Conv1d(width, width, 3, padding=4, dilation=2),
        )
        self.out = nn.Linear(width, 12)

    def forward(self, x):
        h = torch.relu(self.c1(x[:, None] / 50))[..., : x.shape[1]]
        h = torch.relu(self.c2(h))[..., : x.shape[1]]
        return self.out(h[..., -1]) * 50


def mape(pred, true):
    error = torch.abs(true - pred)
    return (error / true.abs()).mean() * 100  # FAULT


model = TCN()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16, output=fp32")
for epoch in range(3):
    data = series(16)
    amp.zero_grad()
    amp.backward(mape(model(data[:, :60]), data[:, 60:]))
    amp.step()
