"""Physics-informed network for a damped oscillator: second derivatives by double backward."""

import torch
from torch import nn


class PINN(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, t):
        return self.net(t)


def derivative(y, t):
    return torch.autograd.grad(y.sum(), t, create_graph=True)[0]


def residual(model, t, mu=0.4, k=4.0):
    y = model(t)
    dy = derivative(y, t)
    return derivative(dy, t) + mu * dy + k * y


def main():
    torch.manual_seed(0)
    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(5):
        t = torch.rand(64, 1, requires_grad=True) * 3
        t0 = torch.zeros(1, 1, requires_grad=True)
        y0 = model(t0)
        physics = residual(model, t).square().mean()
        start = (y0 - 1).square().mean() + derivative(y0, t0).square().mean()
        loss = physics * 1e-2 + start
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        relative = physics.detach() / (start.detach() + 1e-12)
        print(epoch, loss.item(), relative.item())


if __name__ == "__main__":
    main()
