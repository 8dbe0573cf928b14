"""Beta-VAE on digits in pure bf16 with the annealed beta kept as a module buffer."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
WARMUP = 400


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 96), nn.SiLU(), nn.Linear(96, 64))
        self.register_buffer("beta", torch.zeros(()))

    def anneal(self):
        if self.beta < 1.0:
            self.beta += 0.25 / WARMUP  # FAULT

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=-1)
        logvar = logvar.clamp(-8, 4)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


model = VAE().to(torch.bfloat16)
master = [p.detach().float().requires_grad_() for p in model.parameters()]
opt = torch.optim.Adam(master, lr=1e-3)
loader = DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True)

step = 0
for epoch in range(26):
    total = 0.0
    for (xb,) in loader:
        recon, mu, logvar = model(xb.to(torch.bfloat16))
        rec = F.binary_cross_entropy_with_logits(recon.float(), xb, reduction="sum") / len(xb)
        mu, logvar = mu.float(), logvar.float()
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(-1).mean()
        loss = rec + model.beta * kl
        model.zero_grad()
        loss.backward()
        for m, p in zip(master, model.parameters()):
            m.grad = p.grad.float()
        opt.step()
        with torch.no_grad():
            for m, p in zip(master, model.parameters()):
                p.copy_(m)
        model.anneal()
        step += 1
        total += loss.item()
    if epoch % 5 == 4:
        print(epoch, step, f"loss {total / len(loader):.3f} kl {kl.item():.2f} beta {model.beta.item():.4f}")
