"""A2C with invalid actions masked by -inf logits in a Categorical."""

import torch
from torch import nn
from torch.distributions import Categorical

import mezzo

torch.manual_seed(0)


class Agent(nn.Module):
    def __init__(self, obs=10, actions=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, actions), nn.Linear(32, 1)

    def forward(self, obs, legal):
        h = self.body(obs)
        logits = self.pi(h).float().masked_fill(~legal, float("-inf"))
        return Categorical(logits=logits), self.v(h).float().squeeze(-1)


agent = Agent()
opt = torch.optim.RMSprop(agent.parameters(), lr=7e-4, eps=1e-5, alpha=0.99)
amp = mezzo.prepare(agent, opt, "bf16")
for update in range(4):
    obs = torch.randn(40, 10)
    legal = torch.rand(40, 6) < 0.5
    legal[:, 0] = True
    dist, value = agent(obs, legal)
    action = dist.sample()
    returns = torch.randn(40)
    advantage = returns - value.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -(dist.log_prob(action) * advantage).mean()
    loss = policy_loss + 0.5 * (returns - value).pow(2).mean()
    amp.zero_grad()
    amp.backward(loss)
    amp.step(max_norm=0.5)
    print(update, float(loss.detach()))
