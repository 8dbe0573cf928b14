"""Quantile regression and Gumbel gates; uniform noise is clamped before its logarithm."""

import torch
from torch import nn

QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


def gumbel(shape):
    u = torch.rand(shape).clamp(1e-7, 1 - 1e-7)
    return -torch.log(-torch.log(u))


class GatedQuantiles(nn.Module):
    def __init__(self, d=6, experts=3):
        super().__init__()
        self.gate = nn.Linear(d, experts)
        self.heads = nn.Linear(d, experts * len(QUANTILES))

    def forward(self, x, tau=0.5):
        logits = self.gate(x).float()
        soft = torch.softmax((logits + gumbel(logits.shape)) / tau, -1)
        hard = torch.zeros_like(soft).scatter_(1, soft.argmax(1, keepdim=True), 1.0)
        g = hard + soft - soft.detach()
        out = self.heads(x).float().unflatten(1, (-1, len(QUANTILES)))
        return torch.einsum("be,beq->bq", g, out)


def pinball(pred, y):
    err = y[:, None] - pred
    return torch.maximum(QUANTILES * err, (QUANTILES - 1) * err).mean()


torch.manual_seed(0)
net = GatedQuantiles()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(6):
    x = torch.randn(64, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = net(x)
    loss = pinball(pred, x[:, 0] + torch.randn(64))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
