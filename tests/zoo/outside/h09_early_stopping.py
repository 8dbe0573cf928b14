"""Quantile GRU forecaster with early stopping that starts from an infinite best loss, and an EMA of the weights."""

import copy

import torch
import torch.nn as nn

import mezzo


class GRUQuantile(nn.Module):
    def __init__(self, hidden=24, quantiles=(0.1, 0.5, 0.9)):
        super().__init__()
        self.register_buffer("q", torch.tensor(quantiles))
        self.gru, self.head = nn.GRU(1, hidden, batch_first=True), nn.Linear(hidden, len(quantiles))

    def forward(self, x):
        return self.head(self.gru(x)[0][:, -1])


def pinball(pred, y, q):
    e = y[:, None] - pred
    return torch.maximum(q * e, (q - 1) * e).mean()


def series(n):
    t = torch.rand(n, 1) * 6 + torch.arange(21) * 0.3
    s = t.sin() + 0.1 * torch.randn(n, 21)
    return s[:, :20, None], s[:, 20]


def main():
    torch.manual_seed(0)
    model = GRUQuantile()
    ema = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    amp = mezzo.prepare(model, opt, policy="bf16")
    best = torch.tensor(float("inf"))
    for step in range(6):
        x, y = series(64)
        opt.zero_grad()
        loss = pinball(model(x), y, model.q)
        amp.backward(loss)
        amp.step(max_norm=1.0)
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters()):
                a.lerp_(b.float(), 0.1)
            val = pinball(ema(series(32)[0]), series(32)[1], ema.q)
        if val < best:
            best = val
        print(step, loss.item(), best.item())


main()
