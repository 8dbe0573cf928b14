"""A GAN in fp16 with two optimizers and a gradient penalty, whose gradients of gradients must not carry the loss scale."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

# One stepper each: each has its loss, its loss scale and its skipped steps.
amp_generator = mezzo.prepare(generator, of_generator, "fp16, scaling.init_scale=1024")
amp_critic = mezzo.prepare(critic, of_critic, "fp16, scaling.init_scale=1024")


def real(count: int) -> torch.Tensor:
    """Points around (2, -1)."""
    return torch.tensor([2.0, -1.0]) + 0.2 * torch.randn(count, 2)


def distance() -> float:
    """How far the mean of what is made lies from the mean of what is real."""
    with torch.no_grad():
        return (generator(torch.randn(512, 4)).mean(0) - torch.tensor([2.0, -1.0])).norm().item()


before = distance()
for _ in range(60):
    for _ in range(2):
        x, fake = real(64), generator(torch.randn(64, 4)).detach()
        share = torch.rand(64, 1)
        between = (share * x + (1 - share) * fake).requires_grad_()
        (slope,) = amp_critic.grad(critic(between).sum(), between, create_graph=True)  # true gradients
        penalty = (slope.norm(dim=1) - 1).square().mean()
        amp_critic.zero_grad()
        amp_critic.backward(critic(fake).mean() - critic(x).mean() + 10 * penalty)
        amp_critic.step()
    amp_generator.zero_grad()
    critic.requires_grad_(False)  # the critic's gradients are not wanted here
    amp_generator.backward(-critic(generator(torch.randn(64, 4))).mean())
    critic.requires_grad_(True)
    amp_generator.step()

after = distance()
print(f"distance of the means {before:.2f} -> {after:.2f}; critic: {amp_critic.counters()}")
assert after < before / 2
