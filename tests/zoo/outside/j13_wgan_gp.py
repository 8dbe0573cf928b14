"""WGAN-GP on rings; critic with a dead ReLU region. --gp 10"""

import argparse

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 64)
        self.fc2 = nn.Linear(64, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x) - 3.0)).squeeze(-1)


def gradient_penalty(critic, real, fake):
    a = torch.rand(len(real), 1)
    mix = (a * real + (1 - a) * fake).requires_grad_(True)
    out = critic(mix)
    (g,) = torch.autograd.grad(out.sum(), mix, create_graph=True)
    norm = torch.sqrt(g.pow(2).sum(1))  # FAULT
    return (norm - 1).pow(2).mean()


def rings(n):
    t = torch.rand(n) * 6.2832
    r = 1 + torch.randint(0, 2, (n,)).float()
    return torch.stack([r * t.cos(), r * t.sin()], 1)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--gp", type=float, default=10.0)
    args = ap.parse_args()
    torch.manual_seed(0)
    critic, gen = Critic(), nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    d_opt = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))
    g_opt = torch.optim.Adam(gen.parameters(), 1e-4, betas=(0.0, 0.9))
    for it in range(3):
        real, fake = rings(64), gen(torch.randn(64, 4))
        d_loss = critic(fake.detach()).mean() - critic(real).mean()
        d_loss = d_loss + args.gp * gradient_penalty(critic, real, fake.detach())
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        g_loss = -critic(gen(torch.randn(64, 4))).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        print(it, d_loss.item(), g_loss.item())
