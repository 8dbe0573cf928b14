"""Speaker embedding with statistics pooling, variance as E[x^2] - E[x]^2."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class StatsPool(nn.Module):
    def forward(self, x):
        mean = x.mean(-1)
        var = (x * x).mean(-1) - mean * mean
        return torch.cat([mean, var.sqrt()], -1)  # FAULT


class XVector(nn.Module):
    def __init__(self, feats=20, speakers=8):
        super().__init__()
        self.tdnn = nn.Sequential(nn.Conv1d(feats, 32, 5), nn.ReLU(), nn.Conv1d(32, 32, 3))
        self.pool, self.fc = StatsPool(), nn.Linear(64, speakers)

    def forward(self, x):
        return self.fc(self.pool(self.tdnn(x)))


def utterances(n):
    return 6.0 + 0.02 * torch.randn(n, 20, 40)  # log energies of a quiet room


def main():
    torch.manual_seed(0)
    net = XVector()
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    amp = mezzo.prepare(net, opt, policy="bf16")
    for step in range(4):
        x, y = utterances(16), torch.randint(0, 8, (16,))
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        amp.backward(loss)
        amp.step(max_norm=1.0)
        print(step, loss.item())


main()
