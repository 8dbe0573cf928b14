"""Latent ODE with explicit Euler and a cubic term of the wrong sign."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Dynamics(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.linear, self.gain = nn.Linear(dim, dim), nn.Parameter(torch.full((dim,), 0.9))

    def forward(self, h):
        return self.linear(h) + self.gain * h.pow(3)  # FAULT


class LatentODE(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.encoder, self.dynamics, self.decoder = nn.Linear(6, dim), Dynamics(dim), nn.Linear(dim, 6)

    def forward(self, x, steps=14, dt=0.25):
        h, out = self.encoder(x).float(), []
        for _ in range(steps):
            h = h + dt * self.dynamics(h)
            out.append(self.decoder(h))
        return torch.stack(out, 1)


model = LatentODE()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "fp32")
for epoch in range(3):
    x = torch.randn(32, 6) * 2.0
    amp.zero_grad()
    loss = nn.functional.l1_loss(model(x), x[:, None].expand(-1, 14, -1))
    amp.backward(loss)
    amp.step(max_norm=1.0)
