"""Quantile forecasting with instance normalisation of constant series (std floored)."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


class RevIN(nn.Module):
    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        std = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return (x - mean) / std, mean, std


class Forecaster(nn.Module):
    def __init__(self, horizon=6):
        super().__init__()
        self.revin, self.rnn = RevIN(), nn.LSTM(1, 24, batch_first=True)
        self.head, self.horizon = nn.Linear(24, horizon * 3), horizon

    def forward(self, x):
        z, mean, std = self.revin(x)
        h, _ = self.rnn(z[..., None])
        q = self.head(h[:, -1]).view(-1, self.horizon, 3).float()
        return q * std[..., None] + mean[..., None]


def pinball(q, y):
    e = y[..., None] - q
    return torch.maximum(QUANTILES * e, (QUANTILES - 1) * e).mean()


model = Forecaster()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    x = torch.randn(32, 30).cumsum(1)
    x[:5] = 7.0
    y = x[:, 24:]
    amp.zero_grad()
    amp.backward(pinball(model(x[:, :24]), y))
    amp.step(max_norm=1.0)
