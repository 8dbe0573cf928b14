"""Hinge GAN with spectral normalisation and R1 on the square of the gradient (no root)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


def critic():
    return nn.Sequential(spectral_norm(nn.Linear(2, 48)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(48, 1)))


def data(n):
    k = torch.randint(0, 8, (n,)).float() * 0.7854
    return torch.stack([k.cos(), k.sin()], 1) + 0.02 * torch.randn(n, 2)


class Game:
    def __init__(self):
        torch.manual_seed(0)
        self.d, self.g = critic(), nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 2))
        self.d_opt = torch.optim.Adam(self.d.parameters(), 2e-4, betas=(0.5, 0.99))
        self.g_opt = torch.optim.Adam(self.g.parameters(), 2e-4, betas=(0.5, 0.99))

    def d_step(self, n=64):
        real = data(n).requires_grad_(True)
        fake = self.g(torch.randn(n, 4)).detach()
        out = self.d(real)
        (grad,) = torch.autograd.grad(out.sum(), real, create_graph=True)
        loss = F.relu(1 - out).mean() + F.relu(1 + self.d(fake)).mean() + grad.square().sum(1).mean()
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def g_step(self, n=64):
        loss = -self.d(self.g(torch.randn(n, 4))).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        return loss.item()


game = Game()
for it in range(4):
    print(it, game.d_step(), game.g_step())
