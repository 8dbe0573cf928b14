"""mezzo.prepare, policy fp16 at a small scale, with a value head and gradient accumulation."""

import torch
from torch import nn

import mezzo


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.logits, self.value = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.logits(h).float(), self.value(h).float().squeeze(-1)


def rollout(n, g):
    return torch.randn(n, 10, generator=g), torch.randint(0, 4, (n,), generator=g), torch.randn(n, generator=g)


torch.manual_seed(0)
net = Policy()
amp = mezzo.prepare(net, torch.optim.Adam(net.parameters(), lr=3e-4), "fp16, scaling.init_scale=256")
g = torch.Generator().manual_seed(1)
for it in range(6):
    obs, act, ret = rollout(48, g)
    dist = torch.distributions.Categorical(logits=net(obs)[0].detach())
    old = dist.log_prob(act)
    for epoch in range(2):
        logits, value = net(obs)
        new = torch.distributions.Categorical(logits=logits)
        ratio = torch.exp(new.log_prob(act) - old)
        adv = ret - value.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        loss = pg + 0.5 * (value - ret).square().mean() - 0.01 * new.entropy().mean()
        amp.zero_grad()
        amp.backward(loss)
        amp.step(max_norm=0.5)
    print(it, loss.item())
