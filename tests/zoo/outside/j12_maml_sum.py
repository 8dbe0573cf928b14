"""MAML on sinusoids, first order, fp16 autocast; the inner error is a root of a sum."""

import math

import torch
from torch import nn
from torch.func import functional_call


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(1, 40), nn.Linear(40, 40), nn.Linear(40, 1)

    def forward(self, x):
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))


def task(gen, shots):
    amp = 200 + 50 * torch.rand(1, generator=gen)
    phase = torch.rand(1, generator=gen) * math.pi
    x = torch.rand(shots, 1, generator=gen) * 10 - 5
    return x, amp * torch.sin(x + phase)


def rms_err(pred, y):
    err = pred - y.to(pred.dtype)
    total = (err * err).sum()  # FAULT
    return (total / len(y)).sqrt()


def inner(net, x, y, lr=1e-2):
    params = dict(net.named_parameters())
    with torch.autocast("cpu", dtype=torch.float16):
        loss = rms_err(functional_call(net, params, (x,)), y)
    grads = torch.autograd.grad(loss, list(params.values()))
    return {k: p - lr * g for (k, p), g in zip(params.items(), grads)}


gen = torch.Generator().manual_seed(0)
torch.manual_seed(0)
net = Net()
meta = torch.optim.Adam(net.parameters(), lr=1e-3)
for it in range(3):
    meta.zero_grad()
    total = 0.0
    for _ in range(2):
        x, y = task(gen, 20)
        fast = inner(net, x, y)
        qx, qy = task(gen, 20)
        pred = functional_call(net, fast, (qx,))
        total = total + (pred - qy).square().mean() / 1e4
    total.backward()
    meta.step()
    print(it, total.item())
