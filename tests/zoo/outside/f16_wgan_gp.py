"""WGAN-GP on a ring of Gaussians; n_critic = 2."""

import math

import torch
import torch.nn as nn

import mezzo


def ring(n):
    angle = torch.randint(0, 8, (n,)) * math.pi / 4
    return torch.stack([angle.cos(), angle.sin()], -1) * 2 + 0.05 * torch.randn(n, 2)


class Critic(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)  # start neutral
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return self.out(self.net(x))


def gradient_penalty(amp, critic, real, fake):
    eps = torch.rand(real.shape[0], 1)
    mix = (eps * real + (1 - eps) * fake).requires_grad_()
    (grad,) = amp.grad(critic(mix).sum(), mix, create_graph=True)
    slope = torch.sqrt((grad**2).sum(1))  # FAULT
    return ((slope - 1) ** 2).mean()


def main():
    torch.manual_seed(1)
    gen = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    nets = nn.ModuleDict({"gen": gen, "critic": Critic()})
    g_opt = torch.optim.Adam(nets["gen"].parameters(), lr=1e-4, betas=(0.0, 0.9))
    d_opt = torch.optim.Adam(nets["critic"].parameters(), lr=1e-4, betas=(0.0, 0.9))
    amp = mezzo.prepare(nets, [g_opt, d_opt], policy="fp32")
    for it in range(3):
        for _ in range(2):
            real, fake = ring(64), nets["gen"](torch.randn(64, 4)).detach()
            d_opt.zero_grad()
            gp = gradient_penalty(amp, nets["critic"], real, fake)
            d_loss = nets["critic"](fake).mean() - nets["critic"](real).mean() + 10 * gp
            amp.backward(d_loss)
            amp.step(optimizer=d_opt)
        g_opt.zero_grad()
        g_loss = -nets["critic"](nets["gen"](torch.randn(64, 4))).mean()
        amp.backward(g_loss)
        amp.step(optimizer=g_opt)
        print(it, d_loss.item(), g_loss.item())


main()
