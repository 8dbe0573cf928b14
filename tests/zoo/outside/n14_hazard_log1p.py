"""Discrete-time survival in the log domain (logsigmoid, cumulative sums), fp16 with GradScaler."""

import torch
import torch.nn.functional as F
from torch import nn


class Hazards(nn.Module):
    def __init__(self, d=6, bins=40):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, bins))

    def forward(self, x):
        return self.net(x)


def nll(logit, bin_, event):
    log_h, log_s = F.logsigmoid(logit), F.logsigmoid(-logit)
    cum = torch.cumsum(log_s, 1) - log_s  # survival up to the bin, not of it
    at = bin_[:, None]
    before = cum.gather(1, at).squeeze(1)
    here = torch.where(event, log_h.gather(1, at).squeeze(1), log_s.gather(1, at).squeeze(1))
    return -(before + here).mean()


torch.manual_seed(0)
net = Hazards()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for step in range(4):
    x = torch.randn(64, 6)
    bin_, event = torch.randint(0, 40, (64,)), torch.rand(64) < 0.7
    with torch.autocast("cpu", dtype=torch.float16):
        logit = net(x)
    loss = nll(logit.float() * 8, bin_, event)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
