"""GCN with isolated nodes done right: inf degrees are masked before they are used."""

import torch
import torch.nn.functional as F
from torch import nn


class GCNConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout)

    def forward(self, x, edge_index):
        row, col = edge_index
        deg = torch.zeros(x.size(0)).scatter_add_(0, col, torch.ones(col.numel()))
        inv = deg.pow(-0.5)
        inv.masked_fill_(inv == float("inf"), 0)
        norm = inv[row] * inv[col]
        h = self.lin(x)
        return torch.zeros_like(h).index_add(0, col, h[row] * norm[:, None]) + h


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = GCNConv(8, 24), GCNConv(24, 4)

    def forward(self, x, e):
        return self.c2(F.elu(self.c1(x, e)), e)


torch.manual_seed(0)
x, y = torch.randn(50, 8), torch.randint(0, 4, (50,))
edges = torch.randint(0, 45, (2, 160))  # nodes 45 to 49 have none
net = GCN()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
train = torch.rand(50) < 0.7
for epoch in range(5):
    opt.zero_grad()
    loss = F.cross_entropy(net(x, edges)[train], y[train])
    loss.backward()
    opt.step()
    print(epoch, loss.item())
