"""Point process: cumulative intensity by a running sum over a fine grid."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Intensity(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.f1, self.f2 = nn.Linear(3, width), nn.Linear(width, 1)

    def forward(self, marks):
        return nn.functional.softplus(self.f2(torch.relu(self.f1(marks)))).squeeze(-1)


class Hazard(nn.Module):
    def __init__(self):
        super().__init__()
        self.intensity = Intensity()

    def forward(self, marks):
        rate = self.intensity(marks)
        cumulative = rate.cumsum(dim=1)  # FAULT
        return rate, cumulative


def nll(rate, cumulative, event_at, dt):
    index = event_at[:, None]
    log_rate = rate.gather(1, index).squeeze(1).float().log()
    total = cumulative.gather(1, index).squeeze(1).float() * dt
    return (total - log_rate).mean()


model = Hazard()
with torch.no_grad():
    model.intensity.f2.bias.fill_(110.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=16")
for step in range(3):
    marks = torch.rand(16, 800, 3)
    event_at = torch.randint(700, 800, (16,))
    amp.zero_grad()
    rate, cumulative = model(marks)
    amp.backward(nll(rate, cumulative, event_at, dt=1e-3))
    amp.step()
