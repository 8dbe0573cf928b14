"""Neural temporal point process: intensity by softplus in half precision, then its logarithm."""

import torch
import torch.nn.functional as F
from torch import nn


class PointProcess(nn.Module):
    def __init__(self, types=4, d=24):
        super().__init__()
        self.emb = nn.Embedding(types, d)
        self.rnn = nn.GRU(d + 1, d, batch_first=True)
        self.rate = nn.Linear(d, types)
        nn.init.constant_(self.rate.bias, -18.5)  # events are rare

    def forward(self, kind, gap):
        h, _ = self.rnn(torch.cat([self.emb(kind), gap[..., None]], -1))
        return F.softplus(self.rate(h))  # FAULT


def nll(intensity, kind, gap):
    event = torch.log(intensity).gather(-1, kind[..., None]).squeeze(-1)  # FAULT
    integral = intensity.sum(-1) * gap
    return (integral - event).float().mean()


torch.manual_seed(0)
net = PointProcess()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(3):
    kind = torch.randint(0, 4, (8, 13))
    gap = torch.empty(8, 13).exponential_(1.0)
    with torch.autocast("cpu", dtype=torch.float16):
        intensity = net(kind[:, :-1], gap[:, :-1])
    loss = nll(intensity, kind[:, 1:], gap[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
