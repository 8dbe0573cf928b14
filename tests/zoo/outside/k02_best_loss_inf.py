"""Classifier with early stopping: best loss starts at inf, patience, weights of the best epoch."""

import copy
import math

import torch
from torch import nn


class EarlyStopping:
    def __init__(self, patience=3):
        self.best, self.bad, self.patience, self.state = math.inf, 0, patience, None

    def step(self, value, model):
        if value < self.best:
            self.best, self.bad, self.state = value, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def evaluate(model, x, y):
    model.eval()
    best = torch.tensor(float("inf"))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for i in range(0, len(x), 32):
            best = torch.minimum(best, nn.functional.cross_entropy(model(x[i : i + 32]).float(), y[i : i + 32]))
    model.train()
    return best.item()


torch.manual_seed(0)
x = torch.randn(256, 12)
y = (x[:, 0] + x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
stopper = EarlyStopping()
for epoch in range(5):
    for i in range(0, 192, 32):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x[i : i + 32]).float(), y[i : i + 32])
        loss.backward()
        opt.step()
    val = evaluate(model, x[192:], y[192:])
    print(epoch, loss.item(), val)
    if stopper.step(val, model):
        break
model.load_state_dict(stopper.state)
