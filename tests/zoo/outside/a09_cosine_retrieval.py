"""Two-tower retrieval with mean-pooled bags of words; queries may be empty after stop-word removal."""

import torch
from torch import nn

import mezzo

torch.manual_seed(9)
VOCAB, DIM = 200, 32


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, ids):
        x = self.proj(self.table(ids).sum(1))
        return x / x.norm(dim=-1, keepdim=True)  # FAULT


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.item = Tower(), Tower()

    def forward(self, q, d):
        return self.query(q) @ self.item(d).t() * 10


def batches(n):
    for i in range(n):
        q = torch.randint(1, VOCAB, (16, 6))
        d = torch.randint(1, VOCAB, (16, 10))
        if i == 2:
            q[5] = 0
        yield q, d


model = TwoTower()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "bf16")
for step, (q, d) in enumerate(batches(5)):
    logits = model(q, d).float()
    loss = nn.functional.cross_entropy(logits, torch.arange(16))
    amp.zero_grad()
    amp.backward(loss)
    amp.step()
