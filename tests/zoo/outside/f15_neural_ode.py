"""Neural ODE classifier with fixed-step RK2 and a kinetic-energy penalty (RNODE)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Dynamics(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.a, self.b = nn.Linear(dim + 1, hidden), nn.Linear(hidden, dim)

    def forward(self, t, x):
        t = torch.full_like(x[:, :1], t)
        return self.b(torch.tanh(self.a(torch.cat([x, t], -1))))


class ODENet(nn.Module):
    def __init__(self, dim=512, hidden=64, classes=5, steps=4):
        super().__init__()
        self.lift, self.f, self.head = nn.Linear(16, dim), Dynamics(dim, hidden), nn.Linear(dim, classes)
        self.steps = steps

    def forward(self, x):
        x, dt, energy = self.lift(x), 1.0 / self.steps, 0.0
        for i in range(self.steps):
            k = self.f(i * dt, x)
            v = self.f((i + 0.5) * dt, x + 0.5 * dt * k)
            x = x + dt * v
            energy = energy + dt * v.pow(2).sum(-1).mean()  # FAULT
        return self.head(x), energy


torch.manual_seed(5)
net = ODENet()
with torch.no_grad():
    net.f.b.weight.mul_(40)  # a checkpoint of a run without the penalty: fast flows
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
amp = mezzo.prepare(net, opt, policy="fp16, scaling.init_scale=8")
for step in range(4):
    x, y = torch.randn(32, 16), torch.randint(0, 5, (32,))
    opt.zero_grad()
    logits, energy = net(x)
    loss = F.cross_entropy(logits, y) + 1e-5 * energy
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, round(loss.item(), 4), energy.item())
