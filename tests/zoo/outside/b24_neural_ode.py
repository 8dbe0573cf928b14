"""Neural ODE with RK4 on a spiral, adjoint by plain backprop; tanh field keeps the state bounded."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, t, y):
        return self.net(y**3)


class ODE(nn.Module):
    def __init__(self, steps=12, h=0.1):
        super().__init__()
        self.field, self.steps, self.h = Field(), steps, h

    def forward(self, y):
        path = [y]
        for i in range(self.steps):
            t, h, f = i * self.h, self.h, self.field
            k1 = f(t, y)
            k2 = f(t + h / 2, y + h / 2 * k1)
            k3 = f(t + h / 2, y + h / 2 * k2)
            k4 = f(t + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(y)
        return torch.stack(path, 1)


t = torch.linspace(0, 1.2, 13)
target = torch.stack([torch.cos(2 * t), torch.sin(2 * t)], -1)[None] * torch.exp(-0.3 * t)[None, :, None]
model = ODE()
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for itr in range(4):
    amp.zero_grad()
    path = model(torch.tensor([[1.0, 0.0]]))
    loss = (path.float() - target).abs().mean()
    amp.backward(loss)
    amp.step()
    print(itr, float(loss.detach()))
