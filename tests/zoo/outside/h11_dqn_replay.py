"""Double DQN with a replay buffer of NaN-initialised slots, of which only written ones are sampled."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Replay:
    def __init__(self, size=256, obs=4):
        self.s, self.s2 = torch.full((size, obs), float("nan")), torch.full((size, obs), float("nan"))
        self.a, self.r, self.n = torch.zeros(size, dtype=torch.long), torch.full((size,), float("nan")), 0

    def push(self, s, a, r, s2):
        k = slice(self.n, self.n + len(s))
        self.s[k], self.a[k], self.r[k], self.s2[k] = s, a, r, s2
        self.n += len(s)

    def sample(self, n):
        i = torch.randint(0, self.n, (n,))
        return self.s[i], self.a[i], self.r[i], self.s2[i]


def qnet():
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


torch.manual_seed(0)
online, target = qnet(), qnet()
target.load_state_dict(online.state_dict())
opt = torch.optim.Adam(online.parameters(), lr=1e-3)
amp = mezzo.prepare(online, opt, policy="bf16")
buffer = Replay()
for it in range(6):
    s = torch.randn(32, 4)
    a = torch.where(torch.rand(32) < 0.2, torch.randint(0, 3, (32,)), target(s).argmax(-1))
    buffer.push(s, a, s[:, 0] * (a - 1), 0.9 * s + 0.1 * torch.randn(32, 4))
    bs, ba, br, bs2 = buffer.sample(64)
    with torch.no_grad():
        best = target(bs2).gather(1, online(bs2).argmax(-1, keepdim=True)).squeeze(1)
    opt.zero_grad()
    q = online(bs).gather(1, ba[:, None]).squeeze(1)
    loss = F.smooth_l1_loss(q, br + 0.95 * best)
    amp.backward(loss)
    amp.step(max_norm=10.0)
    print(it, loss.item())
