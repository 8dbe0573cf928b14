"""Physics-informed network for u_t = u_xx on [0,1]; the ansatz carries the boundary behaviour sqrt(x)."""

import torch
import torch.nn as nn

import mezzo


class Ansatz(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x, t):
        u = self.net(torch.cat([x, t], 1))
        return x.pow(0.5) * (1 - x) * u  # FAULT


def d(out, inp):
    return torch.autograd.grad(out.sum(), inp, create_graph=True)[0]


def residual(model, x, t):
    u = model(x, t)
    u_x = d(u, x)
    return d(u, t) - d(u_x, x)


def sample(n, step):
    x, t = torch.rand(n, 1) * 0.98 + 0.01, torch.rand(n, 1)
    if step == 2:
        x[:4] = torch.tensor([[0.0], [0.0], [1.0], [1.0]])  # "include the walls", said the reviewer
    return x.requires_grad_(), t.requires_grad_()


def train():
    torch.manual_seed(0)
    model = Ansatz()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    amp = mezzo.prepare(model, opt, policy="fp32")
    for step in range(5):
        x, t = sample(64, step)
        opt.zero_grad()
        pde = residual(model, x, t).square().mean()
        x0 = torch.rand(64, 1)
        ic = (model(x0, torch.zeros_like(x0)) - torch.sin(3.1416 * x0)).square().mean()
        amp.backward(1e-3 * pde + ic)
        amp.step()
        print(step, pde.item(), ic.item())


train()
