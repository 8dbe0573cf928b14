"""Curve fitting with LBFGS in double precision features and an fp32 model."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(1, 16), nn.Linear(16, 1)

    def forward(self, t):
        return self.out(torch.tanh(self.hidden(t)))


t = torch.linspace(-2, 2, 100, dtype=torch.float64)[:, None]
y = (torch.sin(2 * t) + 0.05 * torch.randn(100, 1)).float()
model = Curve()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8, line_search_fn="strong_wolfe")
amp = mezzo.prepare(model, optimizer, "fp32")


def closure():
    amp.zero_grad()
    loss = nn.functional.mse_loss(model(t.float()), y)
    amp.backward(loss)
    return loss


for epoch in range(3):
    amp.step(closure)
    with torch.no_grad():
        print(epoch, nn.functional.mse_loss(model(t.float()), y).item())
