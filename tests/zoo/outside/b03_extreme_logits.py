"""Fraud detection with very confident logits: the loss is the stable one."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

torch.manual_seed(0)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1) * 60


def hand_made(logit, y):
    return F.softplus(-logit) * y + F.softplus(logit) * (1 - y)


model = Scorer()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16")
for step in range(4):
    x = torch.randn(128, 12) * 3
    y = (x[:, 0] > 0).float()
    amp.zero_grad()
    logit = model(x)
    loss = F.binary_cross_entropy_with_logits(logit.float(), y) + hand_made(logit, y).float().mean()
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, logit.detach().abs().max().item())
