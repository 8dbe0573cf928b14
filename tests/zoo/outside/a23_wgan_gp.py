"""WGAN-GP on a ring of Gaussians; the critic is gated."""

import torch
import torch.nn as nn

import mezzo

torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
        with torch.no_grad():
            self.net[0].bias.fill_(-1.2)

    def forward(self, x):
        return self.net(x)


def real_batch(n):
    angle = torch.randint(0, 8, (n,)) * (3.14159 / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


nets = nn.ModuleDict({"gen": Generator(), "critic": Critic()})
opt_c = torch.optim.Adam(nets["critic"].parameters(), lr=1e-3, betas=(0.5, 0.9))
amp = mezzo.prepare(nets, opt_c, "fp32")
for it in range(5):
    real = real_batch(64)
    fake = nets["gen"](torch.randn(64, 4)).detach()
    mix = torch.rand(64, 1)
    inter = (mix * real + (1 - mix) * fake).requires_grad_(True)
    (slope,) = amp.grad(nets["critic"](inter).sum(), inter, create_graph=True)
    slope_norm = slope.pow(2).sum(1).sqrt()  # FAULT
    penalty = 10 * ((slope_norm - 1) ** 2).mean()
    loss = nets["critic"](fake).mean() - nets["critic"](real).mean() + penalty
    amp.zero_grad()
    amp.backward(loss)
    amp.step()
    print(it)
