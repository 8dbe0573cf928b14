"""Exact GP with an RBF kernel: Cholesky is tried with growing jitter and succeeds; duplicates in the data."""

import math

import torch
from torch import nn


class RBF(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale, self.log_len = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        sq = (a[:, None] - b[None]).square().sum(-1)
        return self.log_scale.exp() * torch.exp(-0.5 * sq / self.log_len.exp() ** 2)


class GP(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.log_noise = RBF(), nn.Parameter(torch.tensor(-4.0))

    def forward(self, x, y):
        k = self.kernel(x, x) + self.log_noise.exp() * torch.eye(len(x))
        for jitter in (0.0, 1e-6, 1e-5, 1e-4):
            chol, info = torch.linalg.cholesky_ex(k + jitter * torch.eye(len(x)))
            if info.item() == 0:
                break
        alpha = torch.cholesky_solve(y[:, None], chol).squeeze(1)
        return (0.5 * y @ alpha + chol.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)) / len(x)


torch.manual_seed(0)
x = torch.rand(40, 2)
x[20:] = x[:20]  # every point twice
y = (6 * x[:, 0]).sin() + 0.1 * torch.randn(40)
gp = GP()
opt = torch.optim.LBFGS(gp.parameters(), lr=0.1, max_iter=4)
for it in range(3):

    def closure():
        opt.zero_grad()
        loss = gp(x, y)
        loss.backward()
        return loss

    print(it, opt.step(closure).item())
