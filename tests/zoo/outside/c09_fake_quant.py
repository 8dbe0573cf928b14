"""Quantisation-aware training with a straight-through estimator and dynamic scales per channel."""

import torch
from torch import nn
from torch.nn import functional as F

import mezzo


class FakeQuant(nn.Module):
    def forward(self, x):
        scale = x.detach().abs().amax(dim=0, keepdim=True) / 127.0
        q = torch.round(x / scale).clamp(-128, 127)  # FAULT
        return x + (q * scale - x).detach()


class QLinear(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.act_quant = FakeQuant()

    def forward(self, x):
        return F.linear(self.act_quant(x), self.weight, self.bias)


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 24), QLinear(24, 24), QLinear(24, 5)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        h = torch.relu(self.fc2(h))
        return self.fc3(h)


torch.manual_seed(0)
net = QNet()
with torch.no_grad():
    net.fc1.bias[4] = -30.0
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
amp = mezzo.prepare(net, optimizer, "bf16")
for step in range(3):
    x, y = torch.randn(64, 16), torch.randint(0, 5, (64,))
    amp.zero_grad()
    amp.backward(F.cross_entropy(net(x).float(), y))
    amp.step()
