"""GCN from scratch, node classification; edge list has an isolated node and no self loops."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GCNConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        deg = torch.zeros(x.size(0)).index_add_(0, dst, torch.ones(dst.numel()))
        dis = deg.pow(-0.5)  # FAULT
        h = self.lin(x) * dis.unsqueeze(1)
        out = torch.zeros(x.size(0), h.size(1), dtype=h.dtype).index_add_(0, dst, h[src])
        return out * dis.unsqueeze(1)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(16, 32), GCNConv(32, 3)

    def forward(self, x, e):
        return self.conv2(F.relu(self.conv1(x, e)), e)


torch.manual_seed(0)
n = 40
ring = torch.arange(n - 1)
edge_index = torch.stack([torch.cat([ring, (ring + 1) % (n - 1)]), torch.cat([(ring + 1) % (n - 1), ring])])
x, y = torch.randn(n, 16), torch.randint(0, 3, (n,))
model = GCN()
opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(3):
    model.train()
    opt.zero_grad()
    loss = F.cross_entropy(model(x, edge_index), y)
    loss.backward()
    opt.step()
    print(f"Epoch {epoch:03d}, loss {loss.item():.4f}")
