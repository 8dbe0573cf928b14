"""Deep kernel learning with a Matern-1/2 kernel; the loop retries with more jitter when Cholesky fails."""

import math

import torch
from torch import nn


class MaternHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.log_len = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        sq = (a[:, None] - b[None]).square().sum(-1)
        dist = sq.sqrt()  # FAULT
        return self.log_scale.exp() * torch.exp(-dist / self.log_len.exp())


class DeepGP(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.kernel = MaternHalf()
        self.log_noise = nn.Parameter(torch.tensor(-2.0))

    def forward(self, x, y, jitter):
        z = self.features(x)
        k = self.kernel(z, z) + (self.log_noise.exp() + jitter) * torch.eye(len(x))
        chol = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y[:, None], chol).squeeze(1)
        return 0.5 * y @ alpha + chol.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)


torch.manual_seed(0)
x = torch.randn(40, 4)
y = x[:, 0].sin() + 0.1 * torch.randn(40)
gp = DeepGP()
opt = torch.optim.Adam(gp.parameters(), lr=0.01)
jitter = 1e-6
for it in range(4):
    opt.zero_grad()
    try:
        loss = gp(x, y, jitter)
        loss.backward()
        opt.step()
        print(it, loss.item())
    except torch.linalg.LinAlgError:
        jitter *= 10
        print(it, "Cholesky failed, jitter", jitter)
