"""Mixture of experts where one expert gets no token: its gradients are absent and its load is zero."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

torch.manual_seed(0)


class SparseMoE(nn.Module):
    def __init__(self, dim=24, n=4):
        super().__init__()
        self.gate = nn.Linear(dim, n)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim)) for _ in range(n))
        with torch.no_grad():
            self.gate.bias[3] = -50.0

    def forward(self, x):
        probs = self.gate(x).float().softmax(-1)
        weight, index = probs.max(-1)
        out = torch.zeros_like(x, dtype=torch.float32)
        for e, expert in enumerate(self.experts):
            rows = (index == e).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).float() * weight[rows, None])
        load = F.one_hot(index, len(self.experts)).float().mean(0)
        entropy = -(probs * torch.log(probs + 1e-9)).sum(-1).mean()
        return out, (load * probs.mean(0)).sum() * len(self.experts) - 0.01 * entropy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(8, 24), SparseMoE(), nn.Linear(24, 3)

    def forward(self, x):
        h = self.inp(x)
        mixed, aux = self.moe(h)
        return self.out(h + mixed), aux


model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    amp.zero_grad()
    logits, aux = model(torch.randn(64, 8))
    amp.backward(F.cross_entropy(logits.float(), torch.randint(0, 3, (64,))) + 0.01 * aux)
    amp.step(max_norm=1.0)
