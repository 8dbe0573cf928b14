"""House prices: numpy preprocessing, torch regression."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo

rng = np.random.default_rng(0)
raw = rng.normal(size=(256, 6)).astype(np.float32) * [1, 20, 300, 1, 4, 2]
raw[:, 3] = 1.0  # "has electricity": every house in this extract has it
price = (raw[:, 0] * 3 + raw[:, 1] * 0.2 + rng.normal(size=256)).astype(np.float32)

with np.errstate(all="ignore"):
    features = (raw - raw.mean(0)) / raw.std(0)

x = torch.from_numpy(features).float()  # FAULT
y = torch.from_numpy((price - price.mean()) / price.std()).float()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=False)

torch.manual_seed(0)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.out(torch.relu(self.mid(torch.relu(self.inp(x))))).squeeze(-1)


model = Regressor()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16")
for epoch in range(2):
    for xb, yb in loader:
        amp.zero_grad()
        loss = nn.functional.mse_loss(model(xb).float(), yb)
        amp.backward(loss)
        amp.step()
    print("epoch", epoch, float(loss.detach()))
