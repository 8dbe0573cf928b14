"""Evidential regression with alpha > 1 by softplus; lgamma stays finite."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Evidential(nn.Module):
    def __init__(self, d=5):
        super().__init__()
        self.trunk, self.head = nn.Linear(d, 32), nn.Linear(32, 4)

    def forward(self, x):
        mu, nu, alpha, beta = self.head(torch.tanh(self.trunk(x))).float().unbind(-1)
        return mu, F.softplus(nu) + 1e-3, F.softplus(alpha) + 1.0, F.softplus(beta) + 1e-3


def nig_nll(y, mu, nu, alpha, beta):
    omega = 2 * beta * (1 + nu)
    return (
        0.5 * torch.log(math.pi / nu)
        - alpha * omega.log()
        + (alpha + 0.5) * torch.log((y - mu) ** 2 * nu + omega)
        + torch.lgamma(alpha)
        - torch.lgamma(alpha + 0.5)
    )


torch.manual_seed(0)
net = Evidential()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for it in range(4):
    x = torch.randn(64, 5)
    y = x.sum(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mu, nu, alpha, beta = net(x)
    reg = (y - mu).abs() * (2 * nu + alpha)
    loss = (nig_nll(y, mu, nu, alpha, beta) + 0.01 * reg).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
