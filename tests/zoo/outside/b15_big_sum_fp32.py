"""Feature-matching autoencoder in fp16; the large sum is taken in fp32."""

import torch
from torch import nn

import mezzo


class AutoEncoder(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 32))
        self.decoder = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 128))
        self.critic = nn.Linear(128, 512)
        self.critic.requires_grad_(False)

    def forward(self, noisy, clean):
        fake = self.decoder(self.encoder(noisy))
        difference = self.critic(fake).float() - self.critic(clean).float()
        total = difference.square().sum()
        return total / difference.numel(), total.detach()


torch.manual_seed(8)
model = AutoEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=256")
for i in range(4):
    clean = torch.randn(256, 128) * 3
    amp.zero_grad()
    loss, total = model(clean + 0.1 * torch.randn_like(clean), clean)
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(i, total.item())
