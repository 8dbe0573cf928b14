"""SAC actor whose log-probability uses the softplus form, bf16 autocast; saturated actions are fine."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Actor(nn.Module):
    def __init__(self, obs=6, act=2):
        super().__init__()
        self.body = nn.Linear(obs, 64)
        self.mu, self.log_std = nn.Linear(64, act), nn.Linear(64, act)
        nn.init.constant_(self.mu.bias, 6.0)

    def forward(self, obs):
        h = torch.relu(self.body(obs))
        mu, log_std = self.mu(h).float(), self.log_std(h).float().clamp(-5, 2)
        noise = torch.randn_like(mu)
        u = mu + log_std.exp() * noise
        logp = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        logp = logp - 2 * (math.log(2) - u - F.softplus(-2 * u))
        return torch.tanh(u), logp.sum(-1)


torch.manual_seed(0)
actor, q = Actor(), nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
log_alpha = nn.Parameter(torch.zeros(()))
opt = torch.optim.Adam([*actor.parameters(), log_alpha], lr=3e-4)
for step in range(4):
    obs = torch.randn(64, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, logp = actor(obs)
        value = q(torch.cat([obs, a], 1)).squeeze(1)
    loss = (log_alpha.exp().detach() * logp - value.float()).mean() - (log_alpha * (logp.detach() - 2)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
