"""Rotation regression with the geodesic angle; the head starts at the identity and so do some labels."""

import torch
from torch import nn


def rot6d(v):
    a = nn.functional.normalize(v[:, :3], dim=1)
    b = nn.functional.normalize(v[:, 3:] - (a * v[:, 3:]).sum(1, keepdim=True) * a, dim=1)
    return torch.stack([a, b, torch.cross(a, b, dim=1)], -1)


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 48), nn.ELU())
        self.head = nn.Linear(48, 6)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1.0, 0]))

    def forward(self, x):
        return rot6d(self.head(self.body(x)))


def geodesic(r, s):
    trace = torch.einsum("bij,bij->b", r, s)
    cos = ((trace - 1) / 2).clamp(-1, 1)
    return torch.acos(cos)  # FAULT


def labels(n):
    r = rot6d(torch.randn(n, 6))
    r[::4] = torch.eye(3)  # objects in the canonical pose
    return r


torch.manual_seed(0)
net = PoseNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for it in range(3):
    x, target = torch.randn(16, 24), labels(16)
    loss = geodesic(net(x), target).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
