"""Neural ODE of a slow orbit: fixed-step Euler with many small steps, bf16 state."""

import torch
from torch import nn

torch.manual_seed(13)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, y):
        return self.net(y)


def integrate(field, y, steps=100, horizon=0.05):
    dt = horizon / steps
    for _ in range(steps):
        y = y + dt * field(y)  # FAULT
    return y


def truth(y, horizon=0.05):
    angle = torch.tensor(horizon)
    rotation = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    return y @ rotation.T


field = Field()
nn.init.normal_(field.net[2].weight, std=0.02)
nn.init.zeros_(field.net[2].bias)
optimizer = torch.optim.SGD(field.parameters(), lr=0.02)
for step in range(2):
    phase = 0.3 + 0.9 * torch.rand(64)
    start = 3 * torch.stack([phase.cos(), phase.sin()], 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        end = integrate(field, start.to(torch.bfloat16))
    moved = (end.float() - start).abs().mean()
    loss = (end.float() - truth(start)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(field.parameters(), 1.0)
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f} moved {moved.item():.4f}")
