"""System identification of a damped oscillator by rollouts of a growing horizon."""

import torch
from torch import nn

torch.manual_seed(15)
STATE = 16
true = torch.tensor([[0.98, 0.15], [-0.15, 0.98]])


def trajectories(n, steps):
    s = [torch.randn(n, 2)]
    for _ in range(steps):
        s.append(s[-1] @ true.T)
    return torch.stack(s, 1)


class Rollout(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(2, STATE)
        self.transition = nn.Parameter(torch.eye(STATE) * 1.12 + 0.02 * torch.randn(STATE, STATE))
        self.read = nn.Linear(STATE, 2)

    def forward(self, start, steps):
        h = self.lift(start)
        out = []
        for _ in range(steps):
            h = h @ self.transition  # FAULT
            out.append(self.read(h))
        return torch.stack(out, 1)


model = Rollout()
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
horizon = 4
for step in range(30):
    horizon = min(4 * 2 ** (step // 3), 1024)
    path = trajectories(16, horizon)
    pred = model(path[:, 0], horizon)
    loss = (pred - path[:, 1:]).abs().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    print(step, horizon, f"loss {loss.item():.4g}")
