"""WGAN-GP; the slope's norm has a floor inside the root, and the last critic layer starts at zero."""

import torch
import torch.nn as nn

import mezzo

torch.manual_seed(0)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        nn.init.zeros_(self.net[2].weight)

    def forward(self, x):
        return self.net(x)


class Maker(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, z):
        return self.net(z)


nets = nn.ModuleDict({"maker": Maker(), "critic": Critic()})
opt_m = torch.optim.Adam(nets["maker"].parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(nets["critic"].parameters(), lr=1e-3, betas=(0.5, 0.9))
amp = mezzo.prepare(nets, [opt_m, opt_c], "bf16, output=fp32")
for it in range(4):
    real = torch.randn(64, 2) * 0.1 + 1
    fake = nets["maker"](torch.randn(64, 4)).detach().float()
    inter = torch.lerp(real, fake, torch.rand(64, 1)).requires_grad_(True)
    (slope,) = amp.grad(nets["critic"](inter).sum(), inter, create_graph=True)
    norm = (slope.float().pow(2).sum(1) + 1e-12).sqrt()
    opt_c.zero_grad()
    loss = nets["critic"](fake).mean() - nets["critic"](real).mean() + 10 * (norm - 1).pow(2).mean()
    amp.backward(loss)
    amp.step(optimizer=opt_c)
    opt_m.zero_grad()
    amp.backward(-nets["critic"](nets["maker"](torch.randn(64, 4))).mean())
    amp.step(optimizer=opt_m)
    print(it, float(loss.detach()))
