"""Forecasting from unnormalised volumes; a guard skips bad losses and a try block hides the rest."""

import torch
from torch import nn

torch.manual_seed(0)


class Forecaster(nn.Module):
    def __init__(self, channels=5, hidden=32):
        super().__init__()
        self.inp = nn.Linear(channels, hidden)
        self.rnn = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(torch.tanh(self.inp(x) / 1e5))  # FAULT
        return self.head(h[:, -1]).squeeze(-1)


def windows(n):
    price = torch.rand(n, 30, 4) * 200
    volume = torch.rand(n, 30, 1) * 3e5
    return torch.cat([price, volume], -1), torch.randn(n)


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
skipped = 0
for step in range(6):
    x, y = windows(16)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    except RuntimeError as error:
        print("skipping batch:", error)
print("skipped", skipped, "of 6")
