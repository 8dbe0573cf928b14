"""Image-to-value regression with a log-cosh loss on half precision outputs."""

import argparse

import torch
from torch import nn

import mezzo


class LogCosh(nn.Module):
    def forward(self, pred, target):
        diff = pred - target.to(pred.dtype)
        return torch.log(torch.cosh(diff)).mean()  # FAULT


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(72, 1)
        self.loss = LogCosh()

    def forward(self, x, y):
        return self.loss(self.head(self.features(x)).squeeze(1), y)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--iters", type=int, default=3)
    return p.parse_args()


if __name__ == "__main__":
    args = parse()
    torch.manual_seed(0)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=128")
    for it in range(args.iters):
        x = torch.randn(32, 1, 16, 16)
        age = torch.randint(1, 40, (32,)).float()
        amp.zero_grad()
        amp.backward(model(x, age))
        amp.step()
