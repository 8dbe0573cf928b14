"""Poisson regression of bike rentals, mixed precision. usage: python f01_poisson_counts.py --epochs 2"""

import argparse

import torch
from torch import nn


class CountNet(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.log_rate = nn.Linear(hidden, 1)
        nn.init.constant_(self.log_rate.bias, 9.0)  # mean count of the training years

    def forward(self, x):
        eta = self.log_rate(self.trunk(x)).squeeze(-1)
        rate = torch.exp(eta)  # FAULT
        return rate, eta


def poisson_nll(rate, eta, y):
    return (rate.float() - y * eta.float()).mean()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-4)
    args = p.parse_args()
    torch.manual_seed(1)
    x = torch.randn(256, 6)
    x[200] = torch.tensor([9.0, -7.0, 8.0, 9.0, 6.0, -9.0]) * 4  # one festival day
    y = torch.poisson(torch.full((256,), 8000.0))
    net = CountNet(6, 32)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for epoch in range(args.epochs):
        for i in range(0, 256, args.batch):
            xb, yb = x[i : i + args.batch], y[i : i + args.batch]
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                rate, eta = net(xb)
                loss = poisson_nll(rate, eta, yb)
            scaler.scale(loss * 1e-4).backward()
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
