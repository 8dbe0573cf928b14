"""DDPM with a zero-terminal-SNR schedule; the network predicts noise, the loss is on x0."""

import torch
from torch import nn

import mezzo

torch.manual_seed(1)
T = 50
betas = torch.linspace(1e-3, 0.2, T)
root = torch.cumprod(1 - betas, 0).sqrt()
root = (root - root[-1]) * root[0] / (root[0] - root[-1])  # rescale so that the last step is pure noise


class Denoiser(nn.Module):
    def __init__(self, dim=16, width=64):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp, self.mid, self.out = nn.Linear(dim, width), nn.Linear(width, width), nn.Linear(width, dim)

    def forward(self, x, t):
        h = nn.functional.silu(self.inp(x) + self.time(t))
        return self.out(nn.functional.silu(self.mid(h)))


class Diffusion:
    def __init__(self, model):
        self.model = model

    def loss(self, x0, t):
        a = root[t][:, None]
        noise = torch.randn_like(x0)
        xt = a * x0 + (1 - a**2).sqrt() * noise
        eps = self.model(xt, t).float()
        x0_hat = (xt - (1 - a**2).sqrt() * eps) / a  # FAULT
        return nn.functional.smooth_l1_loss(x0_hat, x0)


net = Denoiser()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
amp = mezzo.prepare(net, optimizer, "bf16")
diffusion = Diffusion(net)
for step in range(6):
    t = torch.randint(0, T, (64,))
    amp.zero_grad()
    amp.backward(diffusion.loss(torch.randn(64, 16), t))
    amp.step(max_norm=1.0)
