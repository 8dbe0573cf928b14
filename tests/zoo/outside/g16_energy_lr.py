"""Regression of an energy; the learning rate of the paper was for another optimizer."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Regress(nn.Module):
    def __init__(self, d=16, hidden=64):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(d, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(F.relu(self.mid(F.relu(self.inp(x)))))


def loop(steps=25, lr=3.0):
    torch.manual_seed(0)
    model = Regress()
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    amp = mezzo.prepare(model, opt, policy="bf16")
    for step in range(steps):
        x = torch.randn(64, 16)
        y = x.square().mean(1, keepdim=True)
        opt.zero_grad()
        loss = (model(x) - y).square().mean()  # FAULT
        amp.backward(loss)
        amp.step()
        if step % 2 == 0:
            print(step, loss.item())


loop()
