"""Exact GP regression by maximum marginal likelihood, plain torch."""

import argparse
import math

import torch
from torch import nn


class RBFKernel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.log_lengthscale = nn.Parameter(torch.zeros(dim))
        self.log_outputscale = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        a, b = a / self.log_lengthscale.exp(), b / self.log_lengthscale.exp()
        d2 = (a[:, None] - b[None]).square().sum(-1)
        return self.log_outputscale.exp() * torch.exp(-0.5 * d2)


class ExactGP(nn.Module):
    """Interpolates: the simulator has no noise, so there is no noise term."""

    def __init__(self, dim):
        super().__init__()
        self.kernel = RBFKernel(dim)
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, x, y):
        K = self.kernel(x, x)
        L = torch.linalg.cholesky(K)  # FAULT
        r = (y - self.mean)[:, None]
        alpha = torch.cholesky_solve(r, L)
        n = len(x)
        return (0.5 * (r * alpha).sum() + L.diagonal().log().sum() + 0.5 * n * math.log(2 * math.pi)) / n


def simulator(x):
    return torch.sin(3 * x[:, 0]) + x[:, 1] ** 2


def acquire(x, it):
    """The next point: mostly random, sometimes the best one so far once more."""
    if it % 10 == 9:
        return x[simulator(x).argmin()][None]
    return 4 * torch.rand(1, 2) - 2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=14)
    ap.add_argument("--inner", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()
    torch.manual_seed(2)
    x = 4 * torch.rand(6, 2) - 2
    gp = ExactGP(2)
    opt = torch.optim.Adam(gp.parameters(), lr=args.lr)
    for it in range(args.rounds):
        x = torch.cat([x, acquire(x, it)])
        y = simulator(x)
        try:
            for _ in range(args.inner):
                opt.zero_grad()
                nll = gp(x, y)
                nll.backward()
                opt.step()
        except torch.linalg.LinAlgError:
            print(f"round {it}: no fit, keep the old hyperparameters")
            continue
        print(f"round {it}: n={len(x)} nll {nll.item():.4f} lengthscale {gp.kernel.log_lengthscale.exp().tolist()}")


if __name__ == "__main__":
    main()
