"""Bayesian personalised ranking with half-precision embeddings, fp32 optimizer state by hand-scaled loss."""

import torch
from torch import nn


class MF(nn.Module):
    def __init__(self, users, items, k):
        super().__init__()
        self.u = nn.Embedding(users, k)
        self.i = nn.Embedding(items, k)
        nn.init.normal_(self.u.weight, std=1.6)
        nn.init.normal_(self.i.weight, std=1.6)

    def score(self, u, i):
        return (self.u(u) * self.i(i)).sum(-1)

    def forward(self, u, pos, neg):
        return self.score(u, pos) - self.score(u, neg)


def bpr_loss(diff):
    return -torch.log(torch.sigmoid(diff)).mean()  # FAULT


def main():
    torch.manual_seed(11)
    model = MF(100, 300, 32).half()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        u = torch.randint(0, 100, (256,))
        pos, neg = torch.randint(0, 300, (256,)), torch.randint(0, 300, (256,))
        loss = bpr_loss(model(u, pos, neg))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 2 == 0:
            print("step", step, "bpr", float(loss))


main()
