"""Recommender with EmbeddingBag: some bags are empty and the loss is pairwise logsigmoid of large gaps."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

torch.manual_seed(17)


class Recommender(nn.Module):
    def __init__(self, items=200, dim=24):
        super().__init__()
        self.history = nn.EmbeddingBag(items, dim, mode="mean")
        self.item, self.mix = nn.Embedding(items, dim), nn.Linear(dim, dim)

    def forward(self, flat, offsets, items):
        user = self.mix(self.history(flat, offsets))
        return (user * self.mix(self.item(items))).sum(-1) * 25


model = Recommender()
opt = torch.optim.Adagrad(model.parameters(), lr=0.01)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    lengths = torch.randint(0, 6, (32,))
    lengths[0] = 0
    flat = torch.randint(0, 200, (int(lengths.sum()),))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    pos, neg = torch.randint(0, 200, (32,)), torch.randint(0, 200, (32,))
    amp.zero_grad()
    gap = model(flat, offsets, pos) - model(flat, offsets, neg)
    loss = -F.logsigmoid(gap.float()).mean()
    amp.backward(loss)
    amp.step()
    print(step, gap.detach().float().abs().max().item())
