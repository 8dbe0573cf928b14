"""mezzo.prepare in fp16: a SwiGLU with outlier channels, whose product does not fit fp16 before the norm."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo


class SwiGLU(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d, h), nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))  # FAULT


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])
        self.mlps = nn.ModuleList([SwiGLU(d, 48), SwiGLU(d, 48)])
        self.out = nn.Linear(d, 1)
        with torch.no_grad():
            self.mlps[1].gate.bias[5] = 400.0
            self.mlps[1].up.bias[5] = 300.0
            self.mlps[1].down.weight[:, 5] = 1e-4

    def forward(self, x):
        h = self.inp(x)
        for norm, mlp in zip(self.norms, self.mlps):
            h = h + mlp(norm(h))
        return self.out(h).squeeze(-1)


torch.manual_seed(0)
net = Net()
amp = mezzo.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4), "fp16, scaling.init_scale=16")
for step in range(4):
    x = torch.randn(16, 6)
    amp.zero_grad()
    amp.backward((net(x).float() - x.sum(1)).square().mean())
    amp.step()
    print(step)
