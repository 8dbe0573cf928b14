"""Gene expression autoencoder, negative binomial likelihood with counts in the thousands."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class NegativeBinomial(nn.Module):
    def forward(self, counts, mean, theta):
        counts = counts.to(mean.dtype)
        log_theta_mean = torch.log(theta + mean)
        ll = torch.lgamma(counts + theta) - torch.lgamma(theta) - torch.lgamma(counts + 1)  # FAULT
        ll = ll + theta * (theta.log() - log_theta_mean) + counts * (mean.log() - log_theta_mean)
        return -ll.float().mean()


class ScVI(nn.Module):
    def __init__(self, genes=24, latent=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(genes, 32), nn.ReLU(), nn.Linear(32, latent))
        self.dec = nn.Linear(latent, 2 * genes)
        self.likelihood = NegativeBinomial()

    def forward(self, counts):
        z = self.enc(torch.log1p(counts))
        mean, theta = nn.functional.softplus(self.dec(z)).add(0.05).chunk(2, dim=-1)
        return self.likelihood(counts, mean, theta)


model = ScVI()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=1")
for epoch in range(3):
    counts = torch.poisson(torch.rand(32, 24) * 12000)
    amp.zero_grad()
    amp.backward(model(counts))
    amp.step()
