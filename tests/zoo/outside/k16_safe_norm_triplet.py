"""Triplet loss with duplicates in the batch: distances have an eps inside the root."""

import torch
from torch import nn


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        z = self.net(x)
        return z / (z.float().square().sum(-1, keepdim=True) + 1e-8).sqrt()


def pairwise(z, eps=1e-8):
    sq = (z[:, None] - z[None]).square().sum(-1)
    return (sq + eps).sqrt()


def batch_hard(z, label, margin=0.2):
    d = pairwise(z.float())
    same = label[:, None] == label[None]
    pos = d.masked_fill(~same, float("-inf")).max(1).values
    neg = d.masked_fill(same, float("inf")).min(1).values
    return torch.relu(pos - neg + margin).mean()


torch.manual_seed(0)
net = Embedder()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(4):
    label = torch.randint(0, 4, (32,))
    label[:4] = torch.arange(4)
    x = torch.randn(32, 12) + label[:, None]
    x[7] = x[6]  # the same picture twice
    label[7] = label[6]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = net(x)
    loss = batch_hard(z, label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
