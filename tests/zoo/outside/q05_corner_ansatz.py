"""Physics-informed network: Poisson problem with a corner-singular ansatz."""

import torch
from torch import nn

torch.manual_seed(0)


class Ansatz(nn.Module):
    """u(x) = |x|^1.5 * n(x): the exponent is known from theory."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return x.abs().pow(1.5) * self.net(x)  # FAULT


def derivative(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


model = Ansatz()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)

for step in range(3):
    x = torch.rand(127, 1)
    if step >= 1:
        x = torch.cat([x, torch.zeros(1, 1)])  # from now on the corner too
    x.requires_grad_(True)
    u = model(x)
    slope = derivative(u, x)
    curvature = derivative(slope, x)
    residual = (x * curvature + slope - torch.sqrt(x.detach() + 1e-3)).pow(2).mean()
    boundary = (model(torch.ones(1, 1)) - 1).pow(2).mean()
    loss = residual + 10 * boundary
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.5f}")
