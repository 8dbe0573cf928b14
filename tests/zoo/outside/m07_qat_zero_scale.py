"""Quantisation-aware training with straight-through rounding; an adapter starts at zero, so its scale is zero."""

import torch
from torch import nn


def fake_quant(w, bits=8):
    scale = w.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    ratio = w / scale  # FAULT
    q = ratio.round().clamp(-128, 127) * scale
    return w + (q - w).detach()


class QLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, fake_quant(self.weight), self.bias)


class Adapter(nn.Module):
    def __init__(self, d, r):
        super().__init__()
        self.down, self.up = QLinear(d, r), QLinear(r, d)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(torch.nn.functional.silu(self.down(x)))


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.inp = QLinear(10, d)
        self.adapter = Adapter(d, 6)
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        return self.head(self.adapter(torch.relu(self.inp(x))))


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(3):
    x, y = torch.randn(32, 10), torch.randint(0, 3, (32,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
