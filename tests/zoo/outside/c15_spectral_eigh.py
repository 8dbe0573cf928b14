"""Learned Mahalanobis metric, reduced to its leading directions by an eigendecomposition; starts at the identity."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Metric(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.factor = nn.Parameter(torch.eye(dim))

    def forward(self):
        return self.factor @ self.factor.t()


class LowRankMetric(nn.Module):
    def __init__(self, dim=6, rank=2):
        super().__init__()
        self.metric, self.rank = Metric(dim), rank

    def forward(self, x):
        values, vectors = torch.linalg.eigh(self.metric())  # FAULT
        leading = vectors[:, -self.rank :] * values[-self.rank :].clamp(min=1e-6).sqrt()
        return x @ leading


def contrastive(z, y, margin=1.0):
    d2 = (z[:, None] - z[None]).square().sum(-1)
    same = (y[:, None] == y[None]).float()
    return (same * d2 + (1 - same) * torch.relu(margin - d2)).mean()


model = LowRankMetric()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
amp = mezzo.prepare(model, opt, "fp32")
for it in range(3):
    y = torch.randint(0, 3, (32,))
    x = torch.randn(32, 6) + y[:, None]
    amp.zero_grad()
    amp.backward(contrastive(model(x), y))
    amp.step()
