"""Top-2 mixture of experts; the other gates are -inf before the softmax, an expert without tokens is skipped."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class TopK(nn.Module):
    def __init__(self, d=20, n=8, k=2):
        super().__init__()
        self.k, self.gate = k, nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(n)
        )

    def forward(self, x):
        logits = self.gate(x).float()
        top, idx = logits.topk(self.k, -1)
        sparse = torch.full_like(logits, float("-inf")).scatter(-1, idx, top)
        w = sparse.softmax(-1)
        out = torch.zeros(x.shape)
        for e, expert in enumerate(self.experts):
            rows = (idx == e).any(-1).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, w[rows, e, None] * expert(x[rows]).float())
        load = (w > 0).float().mean(0)
        aux = (load * logits.softmax(-1).mean(0)).sum() * len(self.experts)
        return out, aux


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(6, 20), TopK(), nn.Linear(20, 3)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        y, aux = self.moe(h)
        return self.out(h + y), aux


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
amp = mezzo.prepare(net, opt, policy="bf16")
for step, n in enumerate([64, 64, 3, 64]):
    opt.zero_grad()
    logits, aux = net(torch.randn(n, 6))
    loss = F.cross_entropy(logits, torch.randint(0, 3, (n,))) + 0.01 * aux
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, n, loss.item())
