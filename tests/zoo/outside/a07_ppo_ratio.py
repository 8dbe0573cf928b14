"""PPO on a toy control task with a Gaussian policy; stale rollouts from an old checkpoint."""

import torch
import torch.nn as nn
from torch.distributions import Normal

import mezzo

torch.manual_seed(0)


class ActorCritic(nn.Module):
    def __init__(self, obs=4, act=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.mu, self.v = nn.Linear(32, act), nn.Linear(32, 1)
        self.log_std = nn.Parameter(torch.full((act,), -2.5))

    def forward(self, obs):
        h = self.body(obs)
        return self.mu(h), self.log_std.exp(), self.v(h).squeeze(-1)


def collect(n=128):
    obs = torch.randn(n, 4)
    action = 0.3 * torch.randn(n, 2)
    behaviour = Normal(torch.full((n, 2), 1.5), torch.full((n, 2), 0.12))
    return obs, action, behaviour.log_prob(action).sum(-1), torch.randn(n)


agent = ActorCritic()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)
amp = mezzo.prepare(agent, optimizer, "bf16, output=fp32")
for update in range(2):
    obs, action, old_logp, returns = collect()
    for _ in range(2):
        mu, std, value = agent(obs)
        dist = Normal(mu, std)
        logratio = dist.log_prob(action).sum(-1) - old_logp
        ratio = logratio.exp()  # FAULT
        adv = returns - value.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        surrogate = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        loss = -surrogate.mean() + 0.5 * (returns - value).pow(2).mean() - 0.01 * dist.entropy().mean()
        amp.zero_grad()
        amp.backward(loss)
        amp.step(max_norm=0.5)
    print("update", update)
