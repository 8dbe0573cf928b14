"""Deep hashing of digits: a binary code from a small encoder, then a linear readout."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(14)
d = load_digits()
x = torch.tensor(d.data, dtype=torch.float32) / 16
y = torch.tensor(d.target)


class Hash(nn.Module):
    def __init__(self, bits=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, bits))
        self.readout = nn.Linear(bits, 10)

    def forward(self, x):
        h = self.encoder(x)
        code = torch.sign(h)  # FAULT
        return self.readout(code), h


net = Hash()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(300):
    idx = torch.randint(0, len(x), (128,))
    logits, h = net(x[idx])
    loss = F.cross_entropy(logits, y[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 30 == 0:
        g = sum(p.grad.abs().sum() for p in net.encoder.parameters()).item()
        print(step, f"loss {loss.item():.4f} encoder grad {g}")
