"""A 56-layer residual-free network with unit-variance weights (should be 1/sqrt(n)); fp32."""

import torch
from torch import nn


class Deep(nn.Module):
    def __init__(self, width=64, depth=56):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.out = nn.Linear(width, 2)
        for layer in self.layers:
            nn.init.normal_(layer.weight)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = torch.relu(layer(h))  # FAULT
        return self.out(h)


def run(steps=3, lr=1e-3):
    torch.manual_seed(0)
    net = Deep()
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(steps):
        x = torch.randn(32, 8)
        y = (x[:, 0] > 0).long()
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, loss.item())


run()
