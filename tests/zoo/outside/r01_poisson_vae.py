"""Variational autoencoder with Poisson likelihood for digit intensities (0..16)."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class Counts(Dataset):
    def __init__(self, lo, hi):
        self.x = torch.tensor(load_digits().data[lo:hi], dtype=torch.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class Rate(torch.autograd.Function):
    """softplus with a memory-light backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.softplus(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        e = torch.exp(x)  # FAULT
        return grad * e / (1 + e)


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 96), nn.ReLU())
        self.mu = nn.Linear(96, latent)
        self.logvar = nn.Linear(96, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x):
        h = self.enc(x / 16)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return Rate.apply(self.dec(z)), mu.float(), logvar.float()


def elbo(rate, x, mu, logvar):
    rate = rate.float().clamp(min=1e-3)
    rec = (rate - x * rate.log()).sum(1)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return (rec + kl).mean()


def evaluate(model, loader):
    model.eval()
    tot = n = 0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        for x in loader:
            tot += elbo(*_swap(model(x), x)).item() * len(x)
            n += len(x)
    return tot / n


def _swap(out, x):
    rate, mu, logvar = out
    return rate, x, mu, logvar


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.manual_seed(6)
    train = DataLoader(Counts(0, 1400), 64, shuffle=True, drop_last=True)
    test = DataLoader(Counts(1400, 1797), 397)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for epoch in range(args.epochs):
        model.train()
        last, skipped = 0.0, 0
        for x in train:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                rate, mu, logvar = model(x)
            loss = elbo(rate, x, mu, logvar)
            before = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            skipped += scaler.get_scale() < before
            last = loss.item()
        print(f"epoch {epoch} loss {last:.3f} test {evaluate(model, test):.3f} skipped {skipped}")


if __name__ == "__main__":
    main()
