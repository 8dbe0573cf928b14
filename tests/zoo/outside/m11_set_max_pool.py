"""Point sets with max pooling by scatter; a set of the batch is empty."""

import torch
from torch import nn


class SetEncoder(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, d), nn.ReLU(), nn.Linear(d, d))
        self.rho = nn.Linear(d, 4)

    def forward(self, points, owner, sets):
        h = self.phi(points)
        pooled = torch.full((sets, h.shape[1]), float("-inf"), dtype=h.dtype)  # FAULT
        index = owner[:, None].expand_as(h)
        pooled = pooled.scatter_reduce(0, index, h, reduce="amax")  # FAULT
        return self.rho(pooled)  # FAULT


def make_batch(sizes):
    owner = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    return torch.randn(int(sum(sizes)), 3), owner


torch.manual_seed(0)
net = SetEncoder()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step, sizes in enumerate([[5, 9, 3, 7], [4, 0, 8, 6], [3, 3, 3, 3]]):
    points, owner = make_batch(sizes)
    labels = torch.randint(0, 4, (len(sizes),))
    loss = nn.functional.cross_entropy(net(points, owner, len(sizes)), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, sizes, loss.item())
