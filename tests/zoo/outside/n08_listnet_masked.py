"""Listwise ranking; queries without documents are left out before the softmax."""

import torch
from torch import nn


class Scorer(nn.Module):
    def __init__(self, d=10):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1))

    def forward(self, docs):
        return self.net(docs).squeeze(-1)


def listnet(scores, relevance, mask):
    keep = mask.any(1)
    scores, relevance, mask = scores[keep], relevance[keep], mask[keep]
    logp = torch.log_softmax(scores.masked_fill(~mask, float("-inf")), 1)
    target = relevance / relevance.sum(1, keepdim=True).clamp(min=1)
    return -(target * logp.masked_fill(~mask, 0.0)).sum(1).mean()


torch.manual_seed(0)
g = torch.Generator().manual_seed(0)
model = Scorer()
opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
for it in range(4):
    docs = torch.randn(12, 8, 10, generator=g)
    size = torch.randint(0, 9, (12,), generator=g)
    mask = torch.arange(8)[None] < size[:, None]
    rel = (torch.rand(12, 8, generator=g) < 0.3).float() * mask
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(docs)
    loss = listnet(scores.float(), rel, mask)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, int(mask.any(1).sum()), loss.item())
