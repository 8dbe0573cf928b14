"""Metric learning with the double-where trick for pairwise distances."""

import torch
import torch.nn as nn

import mezzo


def pairwise(z):
    sq = (z[:, None] - z[None]).square().sum(-1)
    zero = sq == 0
    return torch.where(zero, torch.zeros_like(sq), torch.where(zero, torch.ones_like(sq), sq).sqrt())


def batch_hard(z, y, margin=0.3):
    d = pairwise(z)
    same = y[:, None] == y[None]
    pos = d.masked_fill(~same, float("-inf")).amax(1)  # every row has itself
    neg = d.masked_fill(same, float("inf")).amin(1)  # every row has a stranger
    return (pos - neg + margin).clamp(min=0).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return nn.functional.normalize(self.body(x), dim=-1)


torch.manual_seed(0)
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for i in range(5):
    y = torch.arange(4).repeat_interleave(4)
    x = torch.randn(4, 10).repeat_interleave(4, 0) + 0.5 * torch.randn(16, 10)
    opt.zero_grad()
    loss = batch_hard(model(x), y)
    amp.backward(loss)
    amp.step()
    print(i, loss.item())
