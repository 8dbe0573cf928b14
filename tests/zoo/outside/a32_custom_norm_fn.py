"""A custom autograd Function for unit-length rows, as found in a metric-learning repository."""

import torch
from torch import nn


class UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        length = x.norm(dim=1, keepdim=True)
        y = x / length.clamp(min=1e-12)
        ctx.save_for_backward(y, length)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, length = ctx.saved_tensors
        inner = (grad * y).sum(1, keepdim=True)
        return (grad - y * inner) / length  # FAULT


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24, bias=False), nn.ReLU(), nn.Linear(24, 8, bias=False))

    def forward(self, x):
        return UnitRows.apply(self.body(x))


torch.manual_seed(30)
model = Metric()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
proxies = nn.functional.normalize(torch.randn(4, 8), dim=1)
for step in range(4):
    x, y = torch.randn(64, 12), torch.randint(0, 4, (64,))
    x[60:] = 0.0  # the loader pads the last rows
    logits = model(x) @ proxies.t() / 0.2
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.4f}")
