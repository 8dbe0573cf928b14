"""Cox proportional hazards: log of a running sum of exponentials, by logcumsumexp."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Risk(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.SELU(), nn.Linear(32, 1, bias=False))

    def forward(self, x):
        return self.net(x).squeeze(-1).float() * 8


def cox(risk, time, event):
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order]
    at_risk = torch.logcumsumexp(risk, dim=0)
    return -((risk - at_risk) * event).sum() / event.sum().clamp(min=1)


model = Risk()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    x = torch.randn(128, 10) * 4
    time = torch.rand(128)
    event = (torch.rand(128) < (0.5 if step else 0.0)).float()
    amp.zero_grad()
    loss = cox(model(x), time, event)
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, float(loss.detach()))
