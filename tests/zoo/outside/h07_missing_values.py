"""Tabular regression where NaN marks a missing cell; the imputer replaces it and adds an indicator."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo


class Imputer(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(cols))

    def forward(self, x):
        missing = torch.isnan(x)
        return torch.cat([torch.where(missing, self.fill.to(x.dtype), torch.nan_to_num(x)), missing.to(x.dtype)], -1)


class Tabular(nn.Module):
    def __init__(self, cols=6):
        super().__init__()
        self.impute = Imputer(cols)
        self.net = nn.Sequential(nn.Linear(2 * cols, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(self.impute(x)).squeeze(-1)


def table(n=200, cols=6):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, cols)).astype(np.float32)
    y = (x @ rng.normal(size=cols)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


torch.manual_seed(0)
model = Tabular()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for epoch in range(2):
    for x, y in DataLoader(table(), batch_size=50, shuffle=True):
        opt.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(x), y)
        amp.backward(loss)
        amp.step()
    print(epoch, loss.item())
