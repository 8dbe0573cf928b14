"""QAT with a guarded scale: zero-initialised weights give scale eps, not zero."""

import torch
from torch import nn


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class QLinear(nn.Linear):
    def forward(self, x):
        scale = (self.weight.detach().abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
        w = RoundSTE.apply(self.weight / scale).clamp(-128, 127) * scale
        return nn.functional.linear(x, w, self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = QLinear(10, 24), QLinear(24, 24), nn.Linear(24, 3)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.head(h + self.b(h))


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(32, 10), torch.randint(0, 3, (32,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
