"""Demand model with a root mean squared logarithmic error; the table has returned goods (negative sales)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Demand(nn.Module):
    def __init__(self, stores=10, products=20):
        super().__init__()
        self.store, self.product = nn.Embedding(stores, 8), nn.Embedding(products, 8)
        self.net = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, 1), nn.Softplus())

    def forward(self, s, p, price):
        return self.net(torch.cat([self.store(s), self.product(p), price[:, None]], 1)).squeeze(1)


def rmsle(pred, target):
    diff = torch.log1p(pred) - torch.log1p(target)  # FAULT
    return (diff.square().mean() + 1e-8).sqrt()


torch.manual_seed(0)
n = 160
sales = torch.poisson(torch.full((n,), 5.0))
sales[[70, 130]] = torch.tensor([-2.0, -1.0])
data = TensorDataset(torch.randint(0, 10, (n,)), torch.randint(0, 20, (n,)), torch.rand(n), sales)
model = Demand()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
for s, p, price, y in DataLoader(data, batch_size=32):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(s, p, price)
    loss = rmsle(pred.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
