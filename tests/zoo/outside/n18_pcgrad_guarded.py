"""Gradient surgery with a guarded projection; one task has no gradient in the trunk at first."""

import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(3))
        nn.init.zeros_(self.heads[2].weight)

    def forward(self, x):
        h = self.trunk(x)
        return [head(h).squeeze(-1) for head in self.heads]


def project(g, others):
    for o in others:
        sq = o @ o
        if sq > 0:
            g = g - ((g @ o) / sq).clamp(max=0) * o
    return g


torch.manual_seed(0)
net = MultiTask()
trunk = list(net.trunk.parameters())
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(4):
    x = torch.randn(64, 8)
    targets = [x[:, 0], -x[:, 0], x[:, 1].abs()]
    losses = [(p - t).square().mean() for p, t in zip(net(x), targets)]
    flat = [torch.cat([g.flatten() for g in torch.autograd.grad(one, trunk, retain_graph=True)]) for one in losses]
    merged = sum(project(g, [o for o in flat if o is not g]) for g in flat)
    opt.zero_grad()
    sum(losses).backward()
    torch.nn.utils.vector_to_parameters(merged, [p.grad for p in trunk])
    opt.step()
    print(step, [round(one.item(), 3) for one in losses])
