"""Graph convolution on a citation-like graph with symmetric normalisation."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class GCNConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o)

    def forward(self, x, adj):
        deg = adj.sum(1)
        norm = deg.pow(-0.5)  # FAULT
        adj = norm[:, None] * adj * norm[None, :]
        return adj @ self.lin(x)


class GCN(nn.Module):
    def __init__(self, features=16, classes=4):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(features, 32), GCNConv(32, classes)

    def forward(self, x, adj):
        h = F.dropout(F.relu(self.conv1(x, adj)), 0.5, self.training)
        return self.conv2(h, adj)


torch.manual_seed(123)
n = 60
adj = (torch.rand(n, n) < 0.06).float()
adj = ((adj + adj.t()) > 0).float()
adj.fill_diagonal_(0)
adj[17] = 0
adj[:, 17] = 0
x, y = torch.randn(n, 16), torch.randint(0, 4, (n,))
train = torch.rand(n) < 0.5
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
amp = mezzo.prepare(model, optimizer, "bf16")
for epoch in range(3):
    model.train()
    amp.zero_grad()
    out = model(x, adj)
    amp.backward(F.cross_entropy(out[train].float(), y[train]))
    amp.step()
