"""First-order MAML on sine waves."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Regressor(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(1, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x, params=None):
        p = params or dict(self.named_parameters())
        h = F.relu(F.linear(x, p["l1.weight"], p["l1.bias"]))
        h = F.relu(F.linear(h, p["l2.weight"], p["l2.bias"]))
        return F.linear(h, p["l3.weight"], p["l3.bias"])


def task():
    amp, phase = 0.1 + 4.9 * torch.rand(1), math.pi * torch.rand(1)
    return lambda n: (lambda x: (x, amp * torch.sin(x + phase)))(10 * torch.rand(n, 1) - 5)


def adapt(model, x, y, inner_lr, inner_steps):
    fast = {k: v.clone() for k, v in model.named_parameters()}
    for _ in range(inner_steps):
        loss = F.mse_loss(model(x, fast), y)
        grads = torch.autograd.grad(loss, list(fast.values()))
        fast = {k: v - inner_lr * g.detach() for (k, v), g in zip(fast.items(), grads)}
    return fast


def main(inner_lr=0.9, inner_steps=3, meta_steps=4):
    torch.manual_seed(0)
    model = Regressor()
    meta = torch.optim.Adam(model.parameters(), lr=1e-3)
    amp = mezzo.prepare(model, meta, policy="fp32")
    for it in range(meta_steps):
        meta.zero_grad()
        total = 0.0
        for _ in range(3):
            sample = task()
            fast = adapt(model, *sample(10), inner_lr, inner_steps)
            xq, yq = sample(10)
            total = total + F.mse_loss(model(xq, fast), yq) / 3  # FAULT
        amp.backward(total)
        amp.step()
        print(f"meta {it} query loss {total.item():.4g}")


main()
