"""Pure bf16 Llama-like block with upcasting RMSNorm and AdamW on fp32 copies of the weights kept by hand."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight


class LM(nn.Module):
    def __init__(self, vocab=50, d=32):
        super().__init__()
        self.emb, self.norm = nn.Embedding(vocab, d, padding_idx=0), RMSNorm(d)
        self.gate, self.up, self.down = nn.Linear(d, 64), nn.Linear(d, 64), nn.Linear(64, d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norm(x))


torch.manual_seed(0)
master = LM()
low = LM().to(torch.bfloat16)
opt = torch.optim.AdamW(master.parameters(), lr=3e-4)
for step in range(4):
    with torch.no_grad():
        for p, q in zip(master.parameters(), low.parameters()):
            q.copy_(p)
    ids = torch.randint(1, 50, (8, 20))
    ids[0, 10:] = 0  # padding: rows of zeros in the norm
    loss = F.cross_entropy(low(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
    low.zero_grad()
    loss.backward()
    for p, q in zip(master.parameters(), low.parameters()):
        p.grad = q.grad.float()
    opt.step()
    print(step, loss.item())
