"""Mixture density network for handwriting-like strokes, density by hand, fp16."""

import math

import torch
import torch.nn as nn

import mezzo


class MDN(nn.Module):
    def __init__(self, k=4, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.Tanh())
        self.pi, self.mu, self.log_sigma = (nn.Linear(hidden, k) for _ in range(3))
        nn.init.constant_(self.log_sigma.bias, -9.5)  # strokes are precise

    def forward(self, x, y):
        h = self.body(x)
        sigma = self.log_sigma(h).exp()
        z2 = (y - self.mu(h)).square() / (sigma * sigma)  # FAULT
        logp = self.pi(h).log_softmax(-1) - 0.5 * z2 - self.log_sigma(h) - 0.5 * math.log(2 * math.pi)
        return -logp.logsumexp(-1).mean()


class Runner:
    def __init__(self, policy="fp16, scaling.init_scale=2"):
        torch.manual_seed(1)
        self.model = MDN()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.amp = mezzo.prepare(self.model, self.opt, policy=policy)

    def __call__(self, steps):
        for i in range(steps):
            x = torch.rand(64, 2)
            self.opt.zero_grad()
            loss = self.model(x, 1e-4 * torch.randn(64, 1))
            self.amp.backward(loss)
            self.amp.step(max_norm=1.0)
            print(i, loss.item())


Runner()(4)
