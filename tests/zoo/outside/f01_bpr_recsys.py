"""Bayesian personalised ranking on implicit feedback (argparse script)."""

import argparse

import torch
import torch.nn as nn

import mezzo


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--iters", type=int, default=6)
    parser.add_argument("--policy", default="fp16, scaling.init_scale=256")
    return parser.parse_args()


class Tower(nn.Module):
    def __init__(self, count, dim):
        super().__init__()
        self.table = nn.Embedding(count, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, idx):
        return self.proj(self.table(idx))


class BPR(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.user, self.item = Tower(users, dim), Tower(items, dim)

    def score(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1)

    def forward(self, u, pos, neg):
        margin = self.score(u, pos) - self.score(u, neg)
        return -torch.sigmoid(margin).log().mean()  # FAULT


def main():
    args = get_args()
    torch.manual_seed(7)
    model = BPR(200, 500, args.dim)
    with torch.no_grad():
        for tower in (model.user, model.item):
            tower.proj.weight.mul_(2.2)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    amp = mezzo.prepare(model, opt, policy=args.policy)
    for it in range(args.iters):
        u = torch.randint(0, 200, (args.batch_size,))
        pos, neg = torch.randint(0, 500, (2, args.batch_size))
        opt.zero_grad()
        loss = model(u, pos, neg)
        amp.backward(loss)
        amp.step()
        print(f"iter {it} bpr {loss.item():.4f}")


if __name__ == "__main__":
    main()
