"""A loop full of guards that never fire."""

import logging
import sys

import torch
from torch import nn

logging.basicConfig(level=logging.ERROR, stream=sys.stdout)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        y = self.f(x)
        if torch.isnan(y).any():
            raise FloatingPointError("NaN in forward")
        return y.squeeze(-1)


def safe_step(model, optimizer, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x)
    loss = nn.functional.huber_loss(pred.float(), y)
    if not torch.isfinite(loss):
        logging.error("bad loss %s", loss.item())
        return None
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if torch.isinf(norm) or torch.isnan(norm):
        optimizer.zero_grad()
        return None
    optimizer.step()
    return loss.item()


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
best, patience = float("inf"), 0
for step in range(12):
    x = torch.randn(64, 10)
    try:
        loss = safe_step(model, optimizer, x, x.sum(1).sin())
    except (FloatingPointError, RuntimeError) as error:
        print("skipping", error)
        continue
    if loss is not None and loss < best:
        best, patience = loss, 0
    else:
        patience += 1
    if patience > 5:
        break
print("best", best)
