"""Supervised contrastive learning; the classes are unbalanced."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import mezzo


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, 2, 1)
        self.proj = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, x):
        return F.normalize(self.proj(F.relu(self.conv(x)).mean((2, 3))), dim=-1)


def supcon(z, labels, tau=0.2):
    sim = (z @ z.T) / tau
    same = (labels[:, None] == labels[None]).float() - torch.eye(len(z))
    sim = sim - 1e9 * torch.eye(len(z))
    logp = sim - sim.logsumexp(1, keepdim=True)
    return -((same * logp).sum(1) / same.sum(1)).mean()  # FAULT


def main():
    torch.manual_seed(0)
    images = torch.rand(50, 1, 8, 8)
    labels = torch.arange(50) // 10
    labels[49] = 7  # a class with a single picture
    model = Backbone()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = mezzo.prepare(model, opt, policy="bf16")
    order = torch.cat([torch.randperm(40), torch.arange(40, 50)])
    loader = DataLoader(TensorDataset(images[order], labels[order]), batch_size=20)
    for epoch in range(2):
        for x, y in loader:
            opt.zero_grad()
            loss = supcon(model(x), y)
            amp.backward(loss)
            amp.step()
            print(epoch, loss.item())


main()
