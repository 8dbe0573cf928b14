"""Residual regression: last layer starts at zero so that the block is the identity."""

import torch
import torch.nn as nn
from sklearn.datasets import make_friedman1
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(22)
X, y = make_friedman1(1024, n_features=10, noise=0.3, random_state=0)
X = torch.tensor(X, dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.inner = weight_norm(nn.Linear(d, d))
        self.act = nn.LeakyReLU(0.1)
        outer = nn.Linear(d, d)
        nn.init.zeros_(outer.weight)
        nn.init.zeros_(outer.bias)
        self.outer = weight_norm(outer)

    def forward(self, x):
        h = self.act(self.inner(x))
        return x + self.outer(h)  # FAULT


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.stem = weight_norm(nn.Linear(10, d))
        self.blocks = nn.ModuleList([ResBlock(d), ResBlock(d)])
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(10):
    perm = torch.randperm(len(X))
    for i in range(0, len(X), 64):
        idx = perm[i : i + 64]
        loss = nn.functional.mse_loss(net(X[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
