"""Exact GP hyperparameters by marginal likelihood, Matern-1/2 kernel."""

import math

import torch
from torch import nn

torch.manual_seed(0)


class Matern(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_length, self.log_scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        a, b = a / self.log_length.exp(), b / self.log_length.exp()
        diff = a[:, None, :] - b[None, :, :]
        r = torch.sqrt((diff * diff).sum(-1))  # FAULT
        return self.log_scale.exp() * torch.exp(-r)


class ExactGP(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.log_noise = Matern(), nn.Parameter(torch.tensor(-2.0))

    def forward(self, x, y):
        K = self.kernel(x, x) + self.log_noise.exp() * torch.eye(len(x))
        L = torch.linalg.cholesky(K)
        alpha = torch.cholesky_solve(y[:, None], L).squeeze(1)
        return 0.5 * y @ alpha + L.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)


x = torch.rand(40, 2) * 4
y = torch.sin(x[:, 0]) + 0.1 * torch.randn(40)
gp = ExactGP()
optimizer = torch.optim.Adam(gp.parameters(), lr=0.1)
for i in range(5):
    optimizer.zero_grad()
    nll = gp(x, y)
    nll.backward()
    optimizer.step()
    print(f"Iter {i + 1}/5 - Loss: {nll.item():.3f}")
