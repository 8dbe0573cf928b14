"""Positive decay rates by a softplus parametrization, a linear state-space filter in pure bf16."""

import torch
from torch import nn
from torch.nn.utils import parametrize

torch.manual_seed(5)


class Positive(nn.Module):
    """softplus, with its inverse so that the start value can be given."""

    def forward(self, raw):
        return torch.nn.functional.softplus(raw)

    def right_inverse(self, value):
        return torch.log(torch.exp(value) - 1)  # FAULT


class DecayFilter(nn.Module):
    def __init__(self, channels, slowest=1e-3, fastest=0.5):
        super().__init__()
        self.rate = nn.Parameter(torch.logspace(-3, -0.3, channels))
        self.mix = nn.Linear(channels, 1)
        self.inp = nn.Linear(1, channels)

    def forward(self, x):
        u = self.inp(x)
        keep = torch.exp(-self.rate)
        state = torch.zeros_like(u[:, 0])
        out = []
        for t in range(u.shape[1]):
            state = keep * state + u[:, t]
            out.append(state)
        return self.mix(torch.stack(out, 1))


model = DecayFilter(16).to(torch.bfloat16)
parametrize.register_parametrization(model, "rate", Positive())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
for step in range(4):
    x = torch.randn(32, 24, 1).to(torch.bfloat16)
    y = torch.cumsum(x.float() * 0.1, 1)
    prior = (torch.log(model.rate.float()) + 3).pow(2).mean()
    loss = (model(x).float() - y).pow(2).mean() + 1e-3 * prior
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
