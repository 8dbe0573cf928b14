"""Regression on unscaled features, plain SGD."""

import torch
import torch.nn as nn

import mezzo

torch.manual_seed(0)
t = torch.linspace(0, 9, 200)
X = torch.stack([t, t**2, t**3], dim=1)
y = (0.5 * t - 0.1 * t**2 + 0.02 * t**3)[:, None]


class Poly(nn.Module):
    def __init__(self):
        super().__init__()
        self.coef = nn.Linear(3, 1)

    def forward(self, x):
        return self.coef(x)


class History(list):
    def log(self, step, loss):
        self.append((step, loss))


model = Poly()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
amp = mezzo.prepare(model, opt, "fp32")
history = History()
for step in range(40):
    amp.zero_grad()
    pred = model(X)
    loss = (pred - y).pow(2).mean()  # FAULT
    amp.backward(loss)
    amp.step()
    history.log(step, loss.detach())
print(len(history), "steps")
