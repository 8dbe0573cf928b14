"""Node classification with a two-layer GCN on a stochastic block model, half precision."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def sbm(n, k, p_in, p_out, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % k
    same = y[:, None] == y[None, :]
    prob = torch.where(same, torch.tensor(p_in), torch.tensor(p_out))
    upper = torch.triu((torch.rand(n, n, generator=g) < prob).float(), diagonal=1)
    adj = upper + upper.t()
    x = torch.randn(n, 32, generator=g)
    x[:, :k] += F.one_hot(y, k).float()
    return x, adj, y


def normalise(adj):
    adj = adj + torch.eye(adj.size(0))
    deg = adj.sum(1)
    inv = deg.pow(-0.5)
    return inv[:, None] * adj * inv[None, :]


class GCNLayer(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin = nn.Linear(d_in, d_out)

    def forward(self, a, x):
        return a @ self.lin(x)


class GCN(nn.Module):
    def __init__(self, d_in, hidden, classes):
        super().__init__()
        self.conv1 = GCNLayer(d_in, hidden)
        self.conv2 = GCNLayer(hidden, classes)

    def forward(self, a, x):
        h = F.relu(self.conv1(a, x))
        return self.conv2(a, h)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--nodes", type=int, default=400)
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--lr", type=float, default=5e-3)
    args = p.parse_args()
    torch.manual_seed(11)

    x, adj, y = sbm(args.nodes, 4, 0.08, 0.01, seed=11)
    a = normalise(adj)
    perm = torch.randperm(args.nodes)
    train_idx, test_idx = perm[:100], perm[100:]

    # everything in half to fit bigger graphs
    model = GCN(32, 64, 4).half()
    a, x = a.half(), x.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        optimizer.zero_grad()
        out = model(a, x)
        loss = F.cross_entropy(out[train_idx].float(), y[train_idx])
        loss.backward()
        optimizer.step()  # FAULT
        if epoch % 5 == 0:
            model.eval()
            with torch.no_grad():
                pred = model(a, x).argmax(1)
            acc = (pred[test_idx] == y[test_idx]).float().mean().item()
            print(f"epoch {epoch:3d} loss {loss.item():.4f} test acc {acc:.3f}")


if __name__ == "__main__":
    main()
