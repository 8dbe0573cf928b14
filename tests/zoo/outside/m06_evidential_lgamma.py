"""Evidential (normal-inverse-gamma) regression whose evidence may be exactly zero."""

import math

import torch
from torch import nn


class Evidential(nn.Module):
    def __init__(self, d=5, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, width), nn.Tanh())
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        mu, nu, alpha, beta = self.head(self.trunk(x)).unbind(-1)
        return mu, nn.functional.softplus(nu), torch.relu(alpha), nn.functional.softplus(beta)


def nig_nll(y, mu, nu, alpha, beta):
    omega = 2 * beta * (1 + nu)
    return (
        0.5 * torch.log(math.pi / nu)
        - alpha * omega.log()
        + (alpha + 0.5) * torch.log((y - mu) ** 2 * nu + omega)
        + torch.lgamma(alpha)  # FAULT
        - torch.lgamma(alpha + 0.5)
    )


def main():
    torch.manual_seed(0)
    net = Evidential()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for it in range(3):
        x = torch.randn(64, 5)
        y = x.sum(1) + 0.1 * torch.randn(64)
        loss = nig_nll(y, *net(x)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(it, loss.item())


main()
