"""Soft actor-critic style update: the log-probability of a squashed Gaussian in bf16."""

import torch
from torch import nn
from torch.distributions import Normal

import mezzo

torch.manual_seed(0)


class SquashedActor(nn.Module):
    def __init__(self, obs=6, act=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mu, self.log_std = nn.Linear(64, act), nn.Linear(64, act)

    def forward(self, obs):
        h = self.body(obs)
        mu, log_std = self.mu(h), self.log_std(h).clamp(-5, 0)
        raw = mu + log_std.exp() * torch.randn_like(mu)
        action = torch.tanh(raw)
        logp = Normal(mu.float(), log_std.float().exp()).log_prob(raw.float())
        correction = torch.log(1 - action.pow(2))  # FAULT
        return action, (logp - correction).sum(-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, obs, action):
        return self.q(torch.cat([obs, action], -1)).squeeze(-1)


nets = nn.ModuleDict({"actor": SquashedActor(), "critic": Critic()})
with torch.no_grad():
    nets["actor"].mu.bias.fill_(3.6)
opt = torch.optim.Adam(nets.parameters(), lr=3e-4)
amp = mezzo.prepare(nets, opt, "bf16")
for step in range(3):
    obs = torch.randn(128, 6)
    amp.zero_grad()
    action, logp = nets["actor"](obs)
    amp.backward((0.2 * logp.float() - nets["critic"](obs, action).float()).mean())
    amp.step()
