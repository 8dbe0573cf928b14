"""Hinge GAN with spectral norm on a mixture in the plane."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(0)


def real(n):
    side = torch.randint(0, 2, (n, 1)) * 2.0 - 1
    return torch.cat([side, side * 0.5], 1) + 0.1 * torch.randn(n, 2)


generator = nn.Sequential(nn.Linear(3, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 2))
judge = nn.Sequential(
    spectral_norm(nn.Linear(2, 48)),
    nn.LeakyReLU(0.1),
    spectral_norm(nn.Linear(48, 48)),
    nn.LeakyReLU(0.1),
    spectral_norm(nn.Linear(48, 1)),
)
optim_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
optim_j = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.9))

for step in range(6):
    fake = generator(torch.randn(64, 3))
    with torch.autocast("cpu", torch.bfloat16):
        loss_j = torch.relu(1 - judge(real(64))).mean() + torch.relu(1 + judge(fake.detach())).mean()
    optim_j.zero_grad()
    loss_j.backward()
    optim_j.step()
    judge.requires_grad_(False)
    loss_g = -judge(fake).mean()
    optim_g.zero_grad()
    loss_g.backward()
    optim_g.step()
    judge.requires_grad_(True)
    if step % 20 == 0:
        print(f"step {step} judge {loss_j.item():.4f} generator {loss_g.item():.4f}")
