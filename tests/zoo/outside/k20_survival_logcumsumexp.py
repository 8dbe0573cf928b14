"""Cox loss with logcumsumexp; risks of raw income are large but finite, censored cohort handled by clamp."""

import torch
from torch import nn


class Risk(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.bn = nn.BatchNorm1d(d)
        self.net = nn.Sequential(nn.Linear(d, 32), nn.SELU(), nn.Linear(32, 1, bias=False))

    def forward(self, x):
        return self.net(self.bn(x)).squeeze(-1)


def cox(risk, event):
    ll = risk - torch.logcumsumexp(risk, 0)
    return -(ll * event).sum() / event.sum().clamp(min=1)


torch.manual_seed(0)
net = Risk()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(5):
    x = torch.cat([torch.randn(48, 3), 2e4 + 6e4 * torch.rand(48, 1)], 1)
    time = torch.rand(48)
    event = (torch.rand(48) < 0.5).float()
    if step == 3:
        event.zero_()  # everybody censored
    order = time.argsort(descending=True)
    loss = cox(net(x[order]) * 20, event[order])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
