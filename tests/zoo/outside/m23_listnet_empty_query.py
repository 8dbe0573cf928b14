"""ListNet ranking with padded document lists; one query has no document left after filtering."""

import torch
from torch import nn


class Scorer(nn.Module):
    def __init__(self, d=10):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1))

    def forward(self, docs):
        return self.net(docs).squeeze(-1)


def listnet(scores, relevance, mask):
    scores = scores.masked_fill(~mask, float("-inf"))
    target = relevance / relevance.sum(1, keepdim=True).clamp(min=1)
    prob = torch.softmax(scores, 1)  # FAULT
    return -(target * torch.log(prob + 1e-9)).sum(1).mean()


def queries(n, k, g, empty=None):
    docs = torch.randn(n, k, 10, generator=g)
    size = torch.randint(2, k + 1, (n,), generator=g)
    if empty is not None:
        size[empty] = 0
    mask = torch.arange(k)[None] < size[:, None]
    rel = (torch.rand(n, k, generator=g) < 0.3).float() * mask
    return docs, rel, mask


torch.manual_seed(0)
g = torch.Generator().manual_seed(0)
model = Scorer()
opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
for it in range(4):
    docs, rel, mask = queries(12, 8, g, empty=4 if it == 2 else None)
    loss = listnet(model(docs), rel, mask)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
