"""Discrete latent code by Gumbel softmax with the uniform noise kept away from 0 and 1."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


def gumbel_softmax(logits, tau):
    u = torch.rand(logits.shape).clamp(1e-6, 1 - 1e-6)
    noise = -torch.log(-torch.log(u))
    soft = ((logits.float() + noise) / tau).softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard - soft.detach() + soft


class DiscreteVAE(nn.Module):
    def __init__(self, codes=16):
        super().__init__()
        self.enc, self.book, self.dec = nn.Linear(20, codes), nn.Embedding(codes, 12), nn.Linear(12, 20)

    def forward(self, x, tau):
        logits = self.enc(x)
        z = gumbel_softmax(logits, tau) @ self.book.weight
        q = logits.float().log_softmax(-1)
        kl = (q.exp() * (q + torch.log(torch.tensor(16.0)))).sum(-1).mean()
        return (self.dec(z).float() - x).square().mean() + 0.01 * kl


model = DiscreteVAE()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(5):
    tau = max(0.3, 1.0 * 0.7**step)
    amp.zero_grad()
    amp.backward(model(torch.randn(64, 20), tau))
    amp.step()
