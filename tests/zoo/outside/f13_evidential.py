"""Deep evidential regression (Normal-inverse-gamma head)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class NIGHead(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, 4)
        with torch.no_grad():
            self.lin.bias.copy_(torch.tensor([0.0, -18.0, 1.0, 0.0]))

    def forward(self, h):
        gamma, v, alpha, beta = self.lin(h).unbind(-1)
        return gamma, F.softplus(v), F.softplus(alpha) + 1, F.softplus(beta) + 0.1


class EvidentialNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = NIGHead(32)

    def forward(self, x):
        return self.head(self.body(x))


def nig_nll(y, gamma, v, alpha, beta):
    omega = 2 * beta * (1 + v)
    nll = 0.5 * (math.log(math.pi) - torch.log(v))  # FAULT
    nll = nll - alpha * torch.log(omega) + (alpha + 0.5) * torch.log(v * (y - gamma) ** 2 + omega)
    return nll + torch.lgamma(alpha) - torch.lgamma(alpha + 0.5)


def main():
    torch.manual_seed(0)
    net = EvidentialNet()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    amp = mezzo.prepare(net, opt, policy="fp16, scaling.init_scale=32")
    x = torch.linspace(-3, 3, 128)[:, None]
    y = (x**3 / 10 + 0.1 * torch.randn_like(x)).squeeze(-1)
    for epoch in range(5):
        opt.zero_grad()
        gamma, v, alpha, beta = net(x)
        loss = nig_nll(y, gamma, v, alpha, beta).mean()
        amp.backward(loss)
        amp.step(max_norm=10.0)
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
