"""Running observation statistics by Welford's rule in fp64, then a value function in bf16."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class RunningNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(n, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(n, dtype=torch.float64))

    @torch.no_grad()
    def update(self, batch):
        for row in batch.double():
            self.count += 1
            delta = row - self.mean
            self.mean += delta / self.count
            self.m2 += delta * (row - self.mean)

    def forward(self, x):
        std = (self.m2 / self.count.clamp(min=1)).sqrt().clamp(min=1e-4)
        return ((x.double() - self.mean) / std).clamp(-10, 10).float()


class Value(nn.Module):
    def __init__(self, n=6):
        super().__init__()
        self.norm, self.f = RunningNorm(n), nn.Sequential(nn.Linear(n, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, obs):
        return self.f(self.norm(obs)).squeeze(-1)


model = Value()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    obs = torch.randn(16, 6) * torch.tensor([1, 10, 1e4, 1e-3, 0.0, 5]) + 1e3
    model.norm.update(obs)
    returns = obs[:, 0] - 1e3
    amp.zero_grad()
    amp.backward(nn.functional.smooth_l1_loss(model(obs).float(), returns))
    amp.step()
