"""VAE with a Trainer class; encoder gives mu and log-variance."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


@dataclass
class Config:
    latent: int = 8
    hidden: int = 64
    lr: float = 1e-3
    steps: int = 4
    precision: str = "bf16"


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(49, c.hidden), nn.SiLU())
        self.mu, self.logvar = nn.Linear(c.hidden, c.latent), nn.Linear(c.hidden, c.latent)

    def forward(self, x):
        h = self.net(x)
        return self.mu(h), self.logvar(h)


class VAE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.enc = Encoder(c)
        self.dec = nn.Sequential(nn.Linear(c.latent, c.hidden), nn.SiLU(), nn.Linear(c.hidden, 49))

    def forward(self, x):
        mu, logvar = self.enc(x)
        std = torch.exp(logvar)
        return self.dec(mu + std * torch.randn_like(std)), mu, logvar


class Trainer:
    def __init__(self, c):
        self.c, self.model = c, VAE(c)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=c.lr)
        self.amp = mezzo.prepare(self.model, self.opt, policy=c.precision)

    def train_step(self, x):
        self.opt.zero_grad()
        recon, mu, logvar = self.model(x)
        rec = F.mse_loss(recon, x)  # FAULT
        kl = -0.5 * (1 + logvar - mu**2).mean()
        self.amp.backward(rec + 1e-3 * kl)
        self.amp.step(max_norm=1.0)
        return rec.item()

    def fit(self):
        for step in range(self.c.steps):
            x = torch.rand(32, 49) * 255  # raw pixels
            x[0] = x[0] * (20 if step == 2 else 1)  # a saturated sensor frame
            print(step, self.train_step(x))


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(Config()).fit()
