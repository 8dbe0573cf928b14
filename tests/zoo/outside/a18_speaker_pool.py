"""Speaker embedding with statistics pooling."""

import torch
import torch.nn as nn

import mezzo


class StatsPool(nn.Module):
    def forward(self, x):
        mean = x.mean(dim=2)
        second = (x * x).mean(dim=2)
        std = torch.sqrt(second - mean * mean)  # FAULT
        return torch.cat([mean, std], dim=1)


class XVector(nn.Module):
    def __init__(self, feats=24, speakers=8):
        super().__init__()
        self.tdnn = nn.Sequential(nn.Conv1d(feats, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 3, padding=1))
        self.pool = StatsPool()
        self.fc = nn.Linear(64, speakers)

    def forward(self, x):
        return self.fc(self.pool(self.tdnn(x) + 20.0))


def main(steps=3):
    torch.manual_seed(0)
    model = XVector()
    with torch.no_grad():
        model.tdnn[2].weight.mul_(0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp = mezzo.prepare(model, optimizer, "bf16")
    for step in range(steps):
        x = torch.randn(8, 24, 100)
        y = torch.randint(0, 8, (8,))
        amp.zero_grad()
        amp.backward(nn.functional.cross_entropy(model(x).float(), y))
        amp.step()


main()
