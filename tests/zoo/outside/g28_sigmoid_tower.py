"""Sixty sigmoid layers without normalisation, as in 1990."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Tower(nn.Module):
    def __init__(self, width=24, depth=60):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = torch.sigmoid(self.first(x))
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return self.last(x)


def main():
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy="fp32")
    for step in range(4):
        x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        print(step, loss.item(), model.first.weight.grad.abs().max().item())


main()
