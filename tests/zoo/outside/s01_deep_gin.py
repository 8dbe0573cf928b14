"""Graph classification with a (too) deep GIN, sum aggregation."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class RandomGraphs(Dataset):
    """Dense and sparse graphs; the label is which."""

    def __init__(self, n=96, nodes=20, dim=8):
        self.items = []
        for i in range(n):
            label = i % 2
            a = (torch.rand(nodes, nodes) < (0.75 if label else 0.55)).triu(1)
            src, dst = (a | a.T).nonzero(as_tuple=True)
            self.items.append((torch.randn(nodes, dim), torch.stack([src, dst]), label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    xs, es, ys, batch, offset = [], [], [], [], 0
    for k, (x, e, y) in enumerate(items):
        xs.append(x), es.append(e + offset), ys.append(y)
        batch.append(torch.full((len(x),), k))
        offset += len(x)
    return torch.cat(xs), torch.cat(es, 1), torch.cat(batch), torch.tensor(ys)


class GINConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.lin1, self.lin2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        for lin in (self.lin1, self.lin2):
            nn.init.kaiming_normal_(lin.weight, nonlinearity="relu")

    def forward(self, x, edge_index):
        src, dst = edge_index
        agg = torch.zeros_like(x).index_add(0, dst, x[src])  # FAULT
        return F.relu(self.lin2(F.relu(self.lin1((1 + self.eps) * x + agg))))  # FAULT


class GIN(nn.Module):
    def __init__(self, in_dim=8, dim=24, depth=36, classes=2):
        super().__init__()
        self.embed = nn.Linear(in_dim, dim)
        self.convs = nn.ModuleList(GINConv(dim) for _ in range(depth))
        self.readout = nn.Linear(dim, classes)

    def forward(self, x, edge_index, batch):
        h = self.embed(x)
        for conv in self.convs:
            h = conv(h, edge_index)
        pooled = torch.zeros(int(batch.max()) + 1, h.shape[1]).index_add(0, batch, h)
        return self.readout(pooled)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(RandomGraphs(), batch_size=16, shuffle=True, collate_fn=collate)
    model = GIN(depth=args.depth)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step, (x, e, batch, y) in enumerate(loader):
        loss = F.cross_entropy(model(x, e, batch), y)
        if not torch.isfinite(loss):
            print(f"step {step}: bad loss {loss.item()}, skipped")
            continue
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
