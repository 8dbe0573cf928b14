"""BYOL: a target network that follows by moving average, no gradients, cosine loss."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

torch.manual_seed(0)


def encoder():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 32),
    )


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.predictor = (
            encoder(),
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32)),
        )
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)

    def forward(self, a, b):
        with torch.no_grad():
            ta, tb = self.target(a), self.target(b)
        return self.pair(a, tb) + self.pair(b, ta)

    def pair(self, x, t):
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(x)).float(), t.float(), dim=-1).mean()

    @torch.no_grad()
    def follow(self, tau=0.99):
        for p, q in zip(self.online.parameters(), self.target.parameters()):
            q.mul_(tau).add_(p, alpha=1 - tau)


model = BYOL()
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
amp = mezzo.prepare(model, opt, "bf16")
amp.on_applied(model.follow)
for step in range(3):
    x = torch.randn(16, 3, 16, 16)
    amp.zero_grad()
    amp.backward(model(x + 0.1 * torch.randn_like(x), x.flip(-1)))
    amp.step()
