"""Gradient accumulation and activation checkpointing on a residual MLP."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mezzo

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.fc2(torch.relu(self.fc1(self.norm(x))).square()))


class Net(nn.Module):
    def __init__(self, dim=32, depth=4):
        super().__init__()
        self.inp, self.out = nn.Linear(16, dim), nn.Linear(dim, 3)
        self.blocks = nn.ModuleList(Residual(dim) for _ in range(depth))

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.out(h)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16-master")
for step in range(args.steps):
    amp.zero_grad()
    for micro in range(args.accumulate):
        x, y = torch.randn(16, 16), torch.randint(0, 3, (16,))
        amp.backward(nn.functional.cross_entropy(model(x).float(), y) / args.accumulate)
    amp.step(max_norm=1.0)
