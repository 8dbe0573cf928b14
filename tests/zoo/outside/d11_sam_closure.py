"""Sharpness-aware minimisation written by hand; the perturbation divides by a norm with an eps."""

import torch
from torch import nn

torch.manual_seed(0)


class SAM:
    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def climb(self):
        norm = torch.norm(torch.stack([p.grad.norm() for p in self.params if p.grad is not None]))
        self.moved = []
        for p in self.params:
            e = p.grad * (self.rho / (norm + 1e-12))
            p.add_(e)
            self.moved.append(e)

    @torch.no_grad()
    def descend(self):
        for p, e in zip(self.params, self.moved):
            p.sub_(e)
        self.base.step()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 4))

    def forward(self, x):
        return self.f(x)


net = Net()
base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sam = SAM(net.parameters(), base)
for step in range(5):
    x, y = torch.randn(32, 12), torch.randint(0, 4, (32,))
    for turn in (sam.climb, sam.descend):
        base.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x).float(), y)
        loss.backward()
        turn()
    print(step, loss.item())
