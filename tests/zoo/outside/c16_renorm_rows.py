"""Knowledge graph embedding (TransE): entity vectors are put back on the sphere in place after each epoch."""

import torch
from torch import nn

torch.manual_seed(0)
ENTITIES, RELATIONS, DIM = 50, 5, 16


class TransE(nn.Module):
    def __init__(self):
        super().__init__()
        self.entity = nn.Embedding(ENTITIES, DIM, padding_idx=0)
        self.relation = nn.Embedding(RELATIONS, DIM)

    def distance(self, h, r, t):
        return (self.entity(h) + self.relation(r) - self.entity(t)).abs().sum(-1)

    def forward(self, triples, corrupted):
        good = self.distance(*triples.unbind(1))
        bad = self.distance(*corrupted.unbind(1))
        return torch.relu(1.0 + good - bad).mean()


def sample(n):
    h, r, t = torch.randint(0, ENTITIES, (n,)), torch.randint(0, RELATIONS, (n,)), torch.randint(0, ENTITIES, (n,))
    return torch.stack([h, r, t], 1)


model = TransE()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for _ in range(3):
        triples = sample(64)
        corrupted = triples.clone()
        corrupted[:, 2] = torch.randint(0, ENTITIES, (64,))
        loss = model(triples, corrupted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weight = model.entity.weight.data
    weight.div_(weight.norm(dim=1, keepdim=True))  # FAULT
    print(epoch, loss.item())
