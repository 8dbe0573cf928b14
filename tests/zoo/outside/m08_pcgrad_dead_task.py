"""Multi-task training with gradient surgery; one task's head does not use the trunk yet."""

import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(32, 1), nn.Linear(32, 1), nn.Linear(32, 1)])
        nn.init.zeros_(self.heads[2].weight)

    def forward(self, x):
        h = self.trunk(x)
        return [head(h).squeeze(-1) for head in self.heads]


def flat_grad(loss, params):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, retain_graph=True)])


def surgery(grads):
    out = []
    for i, g in enumerate(grads):
        g = g.clone()
        for j, other in enumerate(grads):
            if i != j:
                coef = (g @ other) / (other @ other)  # FAULT
                g = g - coef.clamp(max=0) * other
        out.append(g)
    return torch.stack(out).sum(0)


torch.manual_seed(0)
net = MultiTask()
trunk = list(net.trunk.parameters())
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(3):
    x = torch.randn(64, 8)
    targets = [x[:, 0], -x[:, 0], x[:, 1].abs()]
    losses = [(p - t).square().mean() for p, t in zip(net(x), targets)]
    opt.zero_grad()
    merged = surgery([flat_grad(one, trunk) for one in losses])
    sum(losses).backward()
    offset = 0
    for p in trunk:
        p.grad.copy_(merged[offset : offset + p.numel()].view_as(p))
        offset += p.numel()
    opt.step()
    print(step, [round(one.item(), 3) for one in losses])
