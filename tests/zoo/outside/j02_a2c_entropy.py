"""Advantage actor critic with a hand-written categorical, fp16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self, obs=8, acts=5):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 64), nn.Tanh())
        self.pi = nn.Linear(64, acts)
        self.v = nn.Linear(64, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


class Agent:
    def __init__(self):
        torch.manual_seed(3)
        self.net = ActorCritic()
        with torch.no_grad():
            self.net.pi.weight.mul_(12)  # a policy that was trained for long: sharp
            self.net.pi.bias.copy_(torch.tensor([14.0, 0, 0, 0, -14.0]))
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def losses(self, obs, act, ret):
        logits, value = self.net(obs)
        probs = F.softmax(logits, dim=-1)
        logp = torch.log(probs)  # FAULT
        adv = ret - value.float()
        chosen = logp.gather(1, act[:, None]).squeeze(1)
        entropy = -(probs * logp).sum(-1)
        return -(chosen * adv.detach()).mean() + 0.5 * adv.square().mean() - 0.01 * entropy.mean()

    def update(self, batch):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.losses(*batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


agent = Agent()
g = torch.Generator().manual_seed(0)
for it in range(4):
    obs = torch.randn(32, 8, generator=g)
    act = torch.zeros(32, dtype=torch.long)
    print(it, agent.update((obs, act, torch.randn(32, generator=g))))
