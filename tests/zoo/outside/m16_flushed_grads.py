"""Potential-energy fit in atomic units, pure half precision, no loss scale: gradients are too small for fp16."""

import torch
from torch import nn


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(9, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, pos):
        return self.out(torch.tanh(self.embed(pos))).squeeze(-1)


def weighted_mse(pred, target, weight):
    err = pred - target
    return (weight * err * err).mean()  # FAULT


def molecules(n, g):
    pos = torch.randn(n, 9, generator=g)
    return pos, 0.01 * pos.square().sum(1)


g = torch.Generator().manual_seed(0)
torch.manual_seed(0)
model = Energy().half()
opt = torch.optim.SGD(model.parameters(), lr=50.0)
for step in range(4):
    pos, e = molecules(512, g)
    loss = weighted_mse(model(pos.half()), e.half(), 1e-5)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item(), sum(int((p.grad == 0).sum()) for p in model.parameters()))
