"""Graph attention with isolated nodes: segment softmax by scatter, denominators floored."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class GATLayer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin, self.att = nn.Linear(i, o, bias=False), nn.Linear(2 * o, 1, bias=False)

    def forward(self, x, src, dst):
        h = self.lin(x).float()
        e = nn.functional.leaky_relu(self.att(torch.cat([h[src], h[dst]], -1)).squeeze(-1).float(), 0.2)
        top = torch.full((len(x),), float("-inf")).scatter_reduce(0, dst, e, "amax")
        e = (e - top[dst].detach()).exp()
        total = torch.zeros(len(x)).index_add(0, dst, e).clamp(min=1e-16)
        return torch.zeros_like(h).index_add(0, dst, h[src] * (e / total[dst])[:, None])


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = GATLayer(12, 24), GATLayer(24, 3)

    def forward(self, x, src, dst):
        return self.l2(torch.relu(self.l1(x, src, dst)), src, dst)


n = 50
src, dst = torch.randint(0, n, (160,)), torch.randint(0, n - 5, (160,))
x, y = torch.randn(n, 12), torch.randint(0, 3, (n,))
model = GAT()
opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
amp = mezzo.prepare(model, opt, "bf16")
for epoch in range(4):
    amp.zero_grad()
    amp.backward(nn.functional.cross_entropy(model(x, src, dst).float(), y))
    amp.step()
