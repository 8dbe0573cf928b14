"""Point-set matching with Sinkhorn scaling in fp16."""

import torch
from torch import nn


def sinkhorn(cost, eps, iters=10):
    n, m = cost.shape
    K = torch.exp(-cost / eps)  # FAULT
    a, b = torch.full((n,), 1 / n, dtype=cost.dtype), torch.full((m,), 1 / m, dtype=cost.dtype)
    v = torch.ones(m, dtype=cost.dtype)
    for _ in range(iters):
        u = a / (K @ v)  # FAULT
        v = b / (K.T @ u)
    return (u[:, None] * K * v[None]).mul(cost).sum()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, p):
        return self.net(p)


def main(eps=0.1, steps=3):
    torch.manual_seed(0)
    enc = Encoder()
    opt = torch.optim.Adam(enc.parameters(), lr=1e-3)
    for step in range(steps):
        a, b = torch.randn(24, 3), torch.randn(24, 3) + 3.0
        with torch.autocast("cpu", dtype=torch.float16):
            fa, fb = enc(a), enc(b)
            cost = (fa[:, None] - fb[None]).square().sum(-1)
            loss = sinkhorn(cost, eps)
        opt.zero_grad()
        loss.float().backward()
        opt.step()
        print(step, loss.item())


main()
