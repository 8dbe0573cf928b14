"""Llama-like block in pure fp16 with an RMSNorm that squares without leaving fp16; the residual stream is large."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        var = x.pow(2).mean(-1, keepdim=True)  # FAULT
        return x / torch.sqrt(var + self.eps) * self.weight


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = RMSNorm(d)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in [(d, 2 * d), (d, 2 * d), (2 * d, d)])

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    def __init__(self, vocab=50, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        nn.init.normal_(self.emb.weight, std=0.5)
        with torch.no_grad():
            self.emb.weight[:, 7] = 300.0  # an outlier channel
        self.blocks = nn.ModuleList([Block(d), Block(d)])
        self.norm, self.head = RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


torch.manual_seed(0)
lm = LM().half()
opt = torch.optim.SGD(lm.parameters(), lr=1e-2)
for step in range(3):
    ids = torch.randint(0, 50, (4, 17))
    logits = lm(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
