"""Denoising autoencoder that matches hidden features, summed over the batch."""

import torch
from torch import nn

import mezzo


class AutoEncoder(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 64))
        self.decoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 128))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class FeatureLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(128, 512)
        for p in self.parameters():
            p.requires_grad_(False)

    def forward(self, fake, real):
        difference = self.net(fake) - self.net(real)
        squares = difference.square()
        return squares.sum()  # FAULT


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.auto, self.perceptual = AutoEncoder(), FeatureLoss()

    def forward(self, noisy, clean):
        return self.perceptual(self.auto(noisy), clean)


torch.manual_seed(8)
model = Whole()
optimizer = torch.optim.Adam(model.auto.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=1")
for i in range(3):
    clean = torch.randn(128, 128) * 3
    amp.zero_grad()
    loss = model(clean + 0.1 * torch.randn_like(clean), clean)
    amp.backward(loss)
    amp.step()
