"""Switch-style MoE where two experts never see a token (fp32): counts are clamped before dividing."""

import torch
import torch.nn.functional as F
from torch import nn


class Switch(nn.Module):
    def __init__(self, d=16, n=4):
        super().__init__()
        self.router = nn.Linear(d, n)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
        with torch.no_grad():
            self.router.bias[2:] = -20.0

    def forward(self, x):
        p = F.softmax(self.router(x), -1)
        gate, idx = p.max(-1)
        y = torch.zeros_like(x)
        load = []
        for e, expert in enumerate(self.experts):
            rows = torch.nonzero(idx == e).flatten()
            total = (expert(x[rows]) * gate[rows, None]).sum(0)
            load.append(total.norm() if len(rows) else total.sum())
            y = y.index_copy(0, rows, expert(x[rows]) * gate[rows, None])
        counts = torch.bincount(idx, minlength=len(self.experts)).clamp(min=1)
        mean = torch.zeros(len(self.experts)).index_add(0, idx, gate) / counts
        return y, mean.square().sum() + 0.01 * torch.stack(load).sum()


torch.manual_seed(0)
inp, moe, head = nn.Linear(6, 16), Switch(), nn.Linear(16, 3)
model = nn.ModuleList([inp, moe, head])
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
    h = torch.tanh(inp(x))
    out, aux = moe(h)
    loss = F.cross_entropy(head(h + out), y) + 0.01 * aux
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
