"""First-order-free MAML on sine waves with an inner rate that is far too large."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

torch.manual_seed(0)


class Sine(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(1, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))


def task():
    amplitude, phase = torch.rand(1) * 4.9 + 0.1, torch.rand(1) * 3.14
    x = torch.rand(20, 1) * 10 - 5
    y = amplitude * torch.sin(x + phase)
    return x[:10], y[:10], x[10:], y[10:]


def adapt(model, params, x, y, lr, steps):
    for _ in range(steps):
        loss = F.mse_loss(functional_call(model, params, (x,)), y)  # FAULT
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {k: p - lr * g for (k, p), g in zip(params.items(), grads)}
    return params


model = Sine()
meta = torch.optim.Adam(model.parameters(), lr=1e-3)
for it in range(3):
    total = 0.0
    for _ in range(2):
        xs, ys, xq, yq = task()
        fast = adapt(model, dict(model.named_parameters()), xs, ys, lr=2.0, steps=5)
        total = total + F.mse_loss(functional_call(model, fast, (xq,)), yq)
    meta.zero_grad()
    total.backward()
    meta.step()
    print(it, total.item())
