"""Forecasting with per-window normalisation; windows have different lengths."""

import torch
import torch.nn as nn

import mezzo


class RevIN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True)  # FAULT
        return self.gain * (x - mean) / (std + 1e-5) + self.shift, mean, std


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.revin = RevIN()
        self.rnn, self.out = nn.LSTM(1, hidden, batch_first=True), nn.Linear(hidden, 1)

    def forward(self, x):
        z, mean, std = self.revin(x)
        h, _ = self.rnn(z[..., None])
        return self.out(h[:, -1]) * std + mean


def windows(length, n=16):
    start = torch.rand(n, 1) * 6.28
    s = (start + 0.3 * torch.arange(length + 1)).sin() * 3 + 10
    return s[:, :length], s[:, length:]


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Forecaster()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    amp = mezzo.prepare(model, opt, policy="bf16")
    for step, length in enumerate([24, 12, 6, 1, 24]):  # cold start: one observation so far
        x, y = windows(length)
        opt.zero_grad()
        loss = (model(x) - y).abs().mean()
        amp.backward(loss)
        amp.step(max_norm=1.0)
        print(step, length, loss.item())
