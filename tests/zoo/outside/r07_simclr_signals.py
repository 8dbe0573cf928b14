"""Contrastive learning (NT-Xent) of short signals with activation checkpointing, bf16 autocast."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

LEN, CLASSES = 64, 6


class Signals(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, CLASSES, (n,), generator=g)
        self.phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        t = torch.linspace(0, 1, LEN)
        self.clean = torch.sin(2 * math.pi * (self.y[:, None] + 2).float() * t + self.phase)
        self.noise = 0.8 * torch.randn(n, LEN, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.clean[i] + self.noise[i], self.y[i]


def augment(x):
    shift = int(torch.randint(0, LEN, (1,)))
    gain = 0.7 + 0.6 * torch.rand(len(x), 1)
    return gain * x.roll(shift, dims=1) + 0.2 * torch.randn_like(x)


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.stem = nn.Conv1d(1, 32, 9, stride=2, padding=4)
        self.block = nn.Sequential(nn.GELU(), nn.Conv1d(32, 64, 5, stride=2, padding=2), nn.GELU())
        self.proj = nn.Linear(64, dim)

    def features(self, x):
        h = self.stem(x.unsqueeze(1))
        if self.training:
            h = checkpoint(self.block, h, use_reentrant=False)
        else:
            h = self.block(h)
        return h.mean(dim=2)

    def forward(self, x):
        z = self.proj(self.features(x))
        return F.normalize(z.float(), dim=1, eps=1e-6)


def nt_xent(z1, z2, tau):
    z = torch.cat([z1, z2])
    n = len(z1)
    sim = z @ z.t() / tau
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    pos = torch.cat([torch.arange(n, 2 * n), torch.arange(0, n)])
    pos_sim = sim.gather(1, pos[:, None]).squeeze(1)
    return (torch.logsumexp(sim, dim=1) - pos_sim).mean()


@torch.no_grad()
def knn(model, bank, query):
    model.eval()
    a, b = model(bank.clean + bank.noise), model(query.clean + query.noise)
    d = torch.cdist(b, a)
    vote = bank.y[d.topk(5, largest=False).indices]
    return (vote.mode(dim=1).values == query.y).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--tau", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    torch.manual_seed(0)
    bank, query = Signals(1024, 1), Signals(256, 2)
    loader = DataLoader(bank, 64, shuffle=True, drop_last=True)
    model = Encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    print(f"knn before {knn(model, bank, query):.3f}")
    for epoch in range(args.epochs):
        model.train()
        tot = 0.0
        for x, _ in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z1, z2 = model(augment(x)), model(augment(x))
            loss = nt_xent(z1, z2, args.tau)
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += loss.item()
        print(f"epoch {epoch} loss {tot / len(loader):.4f} knn {knn(model, bank, query):.3f}")


if __name__ == "__main__":
    main()
