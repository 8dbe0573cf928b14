"""Discrete auto-encoder with Gumbel softmax; noise is kept away from 0 and 1."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class GumbelVQ(nn.Module):
    def __init__(self, codes=16, dim=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, codes))
        self.book = nn.Embedding(codes, dim)
        self.dec = nn.Linear(dim, 12)

    def forward(self, x, tau):
        logits = self.enc(x).float()
        u = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
        g = -torch.log(-torch.log(u))
        y = F.softmax((logits + g) / tau, -1)
        p = logits.softmax(-1)
        kl = (p * (p.clamp(min=1e-9).log() + torch.log(torch.tensor(16.0)))).sum(-1).mean()
        return self.dec(y @ self.book.weight), kl


class Trainer:
    def __init__(self, steps=6):
        torch.manual_seed(2)
        self.model, self.steps = GumbelVQ(), steps
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.amp = mezzo.prepare(self.model, self.opt, policy="bf16")

    def run(self):
        for s in range(self.steps):
            x = torch.randn(64, 12)
            tau = max(0.5, 1.0 * 0.9**s)
            self.opt.zero_grad()
            rec, kl = self.model(x, tau)
            loss = F.mse_loss(rec, x) + 0.01 * kl
            self.amp.backward(loss)
            self.amp.step()
            print(s, loss.item(), tau)


Trainer().run()
