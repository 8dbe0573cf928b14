"""Transformer schedule written with numpy: the step counter starts at zero."""

import numpy as np
import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Noam:
    def __init__(self, optimizer, dim, warmup):
        self.optimizer, self.dim, self.warmup, self.n = optimizer, dim, warmup, 0

    def step(self):
        with np.errstate(divide="ignore"):
            lr = self.dim**-0.5 * np.maximum(np.float64(self.n) ** -0.5, 0.0) * 0.1
        for group in self.optimizer.param_groups:
            group["lr"] = float(lr)
        self.n += 1


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.inp = nn.Linear(12, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 2, 64, batch_first=True)
        self.out = nn.Linear(dim, 3)

    def forward(self, x):
        return self.out(self.layer(self.inp(x)).mean(1))


model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
amp = mezzo.prepare(model, optimizer, "bf16")
schedule = Noam(optimizer, 32, 10)
for step in range(4):
    schedule.step()
    amp.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(16, 5, 12)).float(), torch.randint(0, 3, (16,)))
    amp.backward(loss)
    amp.step()  # FAULT
