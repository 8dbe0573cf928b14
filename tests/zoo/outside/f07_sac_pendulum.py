"""Soft actor-critic on a made-up pendulum; only the actor's and critic's updates, no environment package."""

import torch
import torch.nn as nn

import mezzo


class Actor(nn.Module):
    def __init__(self, obs=3, act=1, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean, self.log_std = nn.Linear(hidden, act), nn.Linear(hidden, act)

    def forward(self, obs):
        h = self.body(obs)
        mean, log_std = self.mean(h), self.log_std(h).clamp(-5, 2)
        u = mean + log_std.exp() * torch.randn_like(mean)
        a = torch.tanh(u)
        logp = -0.5 * ((u - mean) / log_std.exp()).square() - log_std
        logp = logp - torch.log(1 - a * a)  # FAULT
        return a, logp.sum(-1)


class Critic(nn.Module):
    def __init__(self, obs=3, act=1, hidden=64):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(obs + act, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, obs, act):
        return self.q(torch.cat([obs, act], -1)).squeeze(-1)


def sample(n):
    theta = torch.rand(n) * 6.28
    return torch.stack([theta.cos(), theta.sin(), torch.randn(n) * 2], -1)


torch.manual_seed(2)
nets = nn.ModuleDict({"actor": Actor(), "critic": Critic()})
nets["actor"].mean.bias.data.fill_(2.0)
pi_opt = torch.optim.Adam(nets["actor"].parameters(), lr=1e-3)
q_opt = torch.optim.Adam(nets["critic"].parameters(), lr=1e-3)
amp = mezzo.prepare(nets, [pi_opt, q_opt], policy="bf16")
alpha = 0.1
for it in range(6):
    obs = sample(256)
    with torch.no_grad():
        act, _ = nets["actor"](obs)
    reward = -(obs[:, 1].square() + 0.1 * obs[:, 2].square() + 1e-3 * act.squeeze(-1).square())
    q_opt.zero_grad()
    q_loss = (nets["critic"](obs, act) - reward).square().mean()
    amp.backward(q_loss)
    amp.step(optimizer=q_opt)
    pi_opt.zero_grad()
    act, logp = nets["actor"](obs)
    pi_loss = (alpha * logp - nets["critic"](obs, act)).mean()
    amp.backward(pi_loss)
    amp.step(optimizer=pi_opt)
    print(f"it {it} q {q_loss.item():.3f} pi {pi_loss.item():.3f}")
