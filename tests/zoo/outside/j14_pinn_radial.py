"""Physics-informed net for a Poisson problem on the disc, features in polar form."""

import torch
from torch import nn


class RadialNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, xy):
        r = torch.sqrt(xy[:, 0:1] ** 2 + xy[:, 1:2] ** 2)  # FAULT
        return self.net(torch.cat([r, r * r], 1))


def laplacian(u, xy):
    (g,) = torch.autograd.grad(u.sum(), xy, create_graph=True)
    lap = 0
    for k in range(2):
        (h,) = torch.autograd.grad(g[:, k].sum(), xy, create_graph=True)
        lap = lap + h[:, k]
    return lap


def grid(n):
    a = torch.arange(-(n // 2), n // 2 + 1) / (n // 2)
    xy = torch.cartesian_prod(a, a)
    return xy[xy.norm(dim=1) <= 1]


torch.manual_seed(0)
model = RadialNet()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
points = grid(11)
theta = torch.linspace(0, 6.28, 32)
boundary = torch.stack([theta.cos(), theta.sin()], 1)
for it in range(3):
    xy = points.clone().requires_grad_(True)
    residual = laplacian(model(xy), xy) + 4
    loss = residual.square().mean() + model(boundary).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
