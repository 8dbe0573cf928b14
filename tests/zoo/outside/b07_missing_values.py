"""Tabular model with missing values: NaN in the table by design, replaced behind a mask in the model."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo

rng = np.random.default_rng(1)
table = rng.normal(size=(200, 8)).astype(np.float32)
table[rng.random(table.shape) < 0.15] = np.nan
target = np.nansum(table[:, :3], axis=1).astype(np.float32)


class Imputer(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.default = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        missing = torch.isnan(x)
        return torch.cat([torch.where(missing, self.default, torch.nan_to_num(x)), missing.float()], dim=1)


class Net(nn.Module):
    def __init__(self, features=8):
        super().__init__()
        self.impute = Imputer(features)
        self.mlp = nn.Sequential(nn.Linear(2 * features, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.mlp(self.impute(x)).squeeze(-1)


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.from_numpy(table), torch.from_numpy(target)), batch_size=50, shuffle=True)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        amp.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        amp.backward(loss)
        amp.step()
        total += float(loss.detach())
    print(epoch, total)
