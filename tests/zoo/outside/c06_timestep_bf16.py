"""Diffusion on sequences: the sinusoidal embedding receives time steps that were cast with everything else."""

import math

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim, self.mlp = dim, nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half) / half)
        steps = t.to(self.mlp[0].weight.dtype).to(torch.bfloat16)  # FAULT
        args = steps[:, None] * freqs.to(torch.bfloat16)
        return self.mlp(torch.cat([args.cos(), args.sin()], dim=-1))


class Denoiser(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.time, self.inp, self.out = TimeEmbedding(dim), nn.Linear(16, dim), nn.Linear(dim, 16)

    def forward(self, x, t):
        return self.out(nn.functional.silu(self.inp(x) + self.time(t)))


model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    t = torch.randint(0, 1000, (64,))
    noise = torch.randn(64, 16)
    amp.zero_grad()
    amp.backward((model(torch.randn(64, 16) + noise, t).float() - noise).square().mean())
    amp.step()
