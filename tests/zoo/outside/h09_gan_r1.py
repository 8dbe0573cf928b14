"""GAN with R1 penalty by squared norms (no root), hinge loss, spectral norm."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

import mezzo


def critic():
    return nn.Sequential(spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(32, 1)))


def main():
    torch.manual_seed(0)
    nets = nn.ModuleDict({"g": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)), "d": critic()})
    og, od = (torch.optim.Adam(nets[k].parameters(), lr=5e-4, betas=(0.0, 0.99)) for k in "gd")
    amp = mezzo.prepare(nets, [og, od], policy="fp32")
    for it in range(4):
        real = (torch.randn(64, 2) * 0.3 + torch.tensor([1.0, -1.0])).requires_grad_()
        fake = nets["g"](torch.randn(64, 4))
        od.zero_grad()
        score = nets["d"](real)
        (grad,) = amp.grad(score.sum(), real, create_graph=True)
        r1 = grad.square().sum(1).mean()
        d_loss = F.relu(1 - score).mean() + F.relu(1 + nets["d"](fake.detach())).mean() + 5 * r1
        amp.backward(d_loss)
        amp.step(optimizer=od)
        og.zero_grad()
        g_loss = -nets["d"](fake).mean()
        amp.backward(g_loss)
        amp.step(optimizer=og)
        print(it, d_loss.item(), g_loss.item())


main()
