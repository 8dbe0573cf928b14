"""Temporal point process: log(1 - exp(-x)) by the stable two-branch formula."""

import math

import torch
import torch.nn as nn

import mezzo


def log1mexp(x):
    """log(1 - exp(-x)), x > 0, without a bad value on either branch."""
    small = x < math.log(2)
    a = torch.where(small, x, torch.ones_like(x))
    b = torch.where(small, torch.ones_like(x), x)
    return torch.where(small, torch.log(-torch.expm1(-a)), torch.log1p(-torch.exp(-b)))


class Rate(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, gaps):
        return self.out(self.rnn(gaps)[0]).squeeze(-1)


def main():
    torch.manual_seed(0)
    model = Rate()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    amp = mezzo.prepare(model, opt, policy="bf16")
    for it in range(5):
        gaps = -torch.log1p(-torch.rand(16, 12, 1) * 0.999)
        opt.zero_grad()
        rate = nn.functional.softplus(model(gaps)) + 1e-4
        seen = (gaps.squeeze(-1) < 1.5).float()
        x = rate * 0.5
        nll = -(seen * log1mexp(x) + (1 - seen) * (-x)).mean()
        amp.backward(nll)
        amp.step(max_norm=1.0)
        print(it, nll.item())


main()
