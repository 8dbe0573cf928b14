"""Quantisation-aware training with a straight-through Function and a learned step size."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class QLinear(nn.Linear):
    def __init__(self, i, o, bits=4):
        super().__init__(i, o)
        self.top = 2 ** (bits - 1) - 1
        self.log_step = nn.Parameter((2 * self.weight.detach().abs().mean() / self.top**0.5).log())

    def forward(self, x):
        step = self.log_step.exp().clamp(min=1e-6)
        w = RoundSTE.apply((self.weight / step).clamp(-self.top, self.top)) * step
        return F.linear(x, w, self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2 = QLinear(16, 32), QLinear(32, 4)

    def forward(self, x):
        return self.q2(F.relu(self.q1(x)))


def main():
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    amp = mezzo.prepare(net, opt, policy="bf16")
    for step in range(6):
        x = torch.randn(64, 16)
        y = (x[:, :4]).argmax(1)
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        amp.backward(loss)
        amp.step(max_norm=1.0)
        print(step, loss.item())


main()
