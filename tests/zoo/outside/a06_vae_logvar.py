"""VAE on 8x8 blobs (argparse script)."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--latent", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.fc21, self.fc22 = nn.Linear(48, latent), nn.Linear(48, latent)
        self.fc3, self.fc4 = nn.Linear(latent, 48), nn.Linear(48, 64)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return self.fc4(F.relu(self.fc3(z))), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy_with_logits(recon.float(), x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())  # FAULT
    return bce + kld


model = VAE(args.latent)
with torch.no_grad():
    model.fc22.bias.fill_(11.5)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
data = torch.rand(128, 64).round()
for epoch in range(1, args.epochs + 1):
    for batch in data.split(args.batch_size):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            recon, mu, logvar = model(batch)
            loss = loss_function(recon, batch, mu, logvar)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"====> Epoch: {epoch} last loss: {loss.item():.4f}")
