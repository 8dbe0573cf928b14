"""Score matching with noise levels down to 0.002; network and preconditioning are half."""

import argparse

import torch
from torch import nn


class Score(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x, sigma):
        h = torch.cat([x, sigma.log().div(4)[:, None]], 1)
        return self.c(torch.relu(self.b(torch.relu(self.a(h)))))


def sigmas(n, low=0.002, high=80.0, rho=7):
    u = torch.linspace(0, 1, n)
    return (high ** (1 / rho) + u * (low ** (1 / rho) - high ** (1 / rho))) ** rho


def loss_weight(sigma, data=0.5):
    return (sigma**2 + data**2) / (sigma * data) ** 2  # FAULT


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=3)
    args = p.parse_args()
    torch.manual_seed(0)
    net = Score().half()
    opt = torch.optim.SGD(net.parameters(), lr=1e-4)
    levels = sigmas(32).half()
    for step in range(args.steps):
        x = torch.randn(32, 2).half() * 0.5
        noisy = x + levels[:, None] * torch.randn(32, 2).half()
        out = net(noisy / (1 + levels[:, None]), levels)
        err = (out.float() - x.float()).square().sum(1)
        loss = (loss_weight(levels) * err).mean() * 1e-3
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()
