"""Personalised PageRank features (APPNP); the adjacency is row-normalised in place, one author has no link."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


def normalised(n, links):
    adj = torch.zeros(n, n)
    adj[links[0], links[1]] = 1.0
    adj[links[1], links[0]] = 1.0
    adj /= adj.sum(1, keepdim=True)  # FAULT
    return adj


class APPNP(nn.Module):
    def __init__(self, i, o, hops=4, alpha=0.1):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o))
        self.hops, self.alpha = hops, alpha

    def forward(self, x, adj):
        h = start = self.mlp(x)
        for _ in range(self.hops):
            h = (1 - self.alpha) * adj @ h + self.alpha * start
        return h


if __name__ == "__main__":
    torch.manual_seed(0)
    adj = normalised(50, torch.randint(0, 49, (2, 300)))
    x, y = torch.randn(50, 10), torch.randint(0, 4, (50,))
    model = APPNP(10, 4)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    amp = mezzo.prepare(model, opt, policy="bf16")
    for epoch in range(4):
        opt.zero_grad()
        loss = F.cross_entropy(model(x, adj)[:49], y[:49])
        amp.backward(loss)
        amp.step()
        print(epoch, loss.item())
