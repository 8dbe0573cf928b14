"""Deep kernel learning with an exact GP; negative log marginal likelihood on all points."""

import math

import torch
import torch.nn as nn


class Features(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))


class GP(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = Features()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.log_noise = nn.Parameter(torch.tensor(-2.0))

    def kernel(self, z):
        diff = z[:, None] - z[None]
        dist = diff.square().sum(-1).sqrt()  # FAULT
        r = math.sqrt(3) * dist / self.log_scale.exp()
        return (1 + r) * torch.exp(-r)

    def forward(self, x, y):
        k = self.kernel(self.phi(x)) + self.log_noise.exp() * torch.eye(len(x))
        chol = torch.linalg.cholesky(k)
        a = torch.cholesky_solve(y[:, None], chol).squeeze(-1)
        return 0.5 * y @ a + chol.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)


torch.manual_seed(0)
x = torch.rand(40, 2) * 4
y = torch.sin(x[:, 0]) + 0.1 * torch.randn(40)
gp = GP()
opt = torch.optim.Adam(gp.parameters(), lr=0.01)
for i in range(10):
    opt.zero_grad()
    nll = gp(x, y)
    nll.backward()
    opt.step()
    if i % 2 == 0:
        print(f"iter {i} nll {nll.item():.3f} noise {gp.log_noise.exp().item():.3f}")
