"""Click-through model, loss written as in the paper's pseudo code."""

import torch
from torch import nn

import mezzo


class Wide(nn.Module):
    def __init__(self, fields=6, buckets=40):
        super().__init__()
        self.linear = nn.EmbeddingBag(fields * buckets, 1, mode="sum")
        self.deep = nn.Sequential(nn.Linear(fields * 4, 32), nn.ReLU(), nn.Linear(32, 1))
        self.emb = nn.Embedding(fields * buckets, 4)
        self.fields, self.buckets = fields, buckets

    def forward(self, x):
        x = x + torch.arange(self.fields) * self.buckets
        return (self.linear(x) + self.deep(self.emb(x).flatten(1))).squeeze(-1)


def binary_loss(logit, y):
    p = torch.sigmoid(logit.to(torch.bfloat16))
    pos = y * torch.log(p)
    neg = (1 - y) * torch.log(1 - p)  # FAULT
    return -(pos + neg).mean()


class Trainer:
    def __init__(self, model, lr, policy):
        self.model = model
        self.optimizer = torch.optim.Adagrad(model.parameters(), lr=lr)
        self.amp = mezzo.prepare(model, self.optimizer, policy)

    def fit(self, loader):
        for x, y in loader:
            self.amp.zero_grad()
            loss = binary_loss(self.model(x), y)
            self.amp.backward(loss)
            self.amp.step()
            print("loss", float(loss.detach()))


torch.manual_seed(11)
net = Wide()
with torch.no_grad():
    net.deep[2].bias.fill_(9.0)
batches = [(torch.randint(0, 40, (64, 6)), (torch.rand(64) < 0.9).float()) for _ in range(3)]
Trainer(net, 0.01, "bf16").fit(batches)
