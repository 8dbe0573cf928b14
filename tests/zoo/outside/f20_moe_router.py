"""Switch-style mixture of experts; expert specialisation is measured by the mean token of each expert."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Expert(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w1, self.w2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Switch(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.router = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(Expert(d) for _ in range(n))

    def forward(self, x):
        gate = self.router(x).softmax(-1)
        top, idx = gate.max(-1)
        out = torch.zeros_like(x)
        centers = []
        for e, expert in enumerate(self.experts):
            picked = idx == e
            out[picked] = expert(x[picked]).to(out.dtype)
            centers.append(x[picked].mean(dim=0))  # FAULT
        spread = torch.pdist(torch.stack(centers).float()).mean()
        return out * top[:, None], spread


class Model(nn.Module):
    def __init__(self, d=24, n=6):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(8, d), Switch(d, n), nn.Linear(d, 4)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        y, spread = self.moe(h)
        return self.out(h + y), spread


torch.manual_seed(0)
model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for step, n in enumerate([256, 256, 256, 5]):  # the last batch of the epoch is short
    x, y = torch.randn(n, 8), torch.randint(0, 4, (n,))
    opt.zero_grad()
    logits, spread = model(x)
    loss = F.cross_entropy(logits, y) - 0.01 * spread
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, loss.item())
