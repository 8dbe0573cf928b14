"""Soft actor-critic: log-probability of a tanh-squashed Gaussian, bf16 autocast."""

import math

import torch
from torch import nn


class Actor(nn.Module):
    def __init__(self, obs=6, act=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 64), nn.ReLU())
        self.mu, self.log_std = nn.Linear(64, act), nn.Linear(64, act)
        nn.init.constant_(self.mu.bias, 4.0)  # a bang-bang task

    def forward(self, obs):
        h = self.body(obs)
        mu, log_std = self.mu(h), self.log_std(h).clamp(-5, 0)
        noise = torch.randn_like(mu)
        u = mu + log_std.exp() * noise
        a = torch.tanh(u)
        gauss = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        logp = gauss - torch.log(1 - a * a)  # FAULT
        return a, logp.sum(-1)


class Critic(nn.Module):
    def __init__(self, obs=6, act=2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs + act, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, obs, a):
        return self.net(torch.cat([obs, a.to(obs.dtype)], -1)).squeeze(-1)


torch.manual_seed(0)
actor, critic = Actor(), Critic()
opt = torch.optim.Adam(actor.parameters(), lr=1e-5)
for step in range(4):
    obs = torch.randn(64, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, logp = actor(obs)
        q = critic(obs, a)
    loss = (0.2 * logp.float() - q.float()).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
