"""Volume rendering of a tiny radiance field; colours are normalised by the accumulated weight."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Field(nn.Module):
    def __init__(self, hidden=48, freqs=4):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(freqs))
        self.mlp = nn.Sequential(nn.Linear(3 + 6 * freqs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(hidden, 1), nn.Linear(hidden, 3)

    def encode(self, p):
        a = (p[..., None] * self.bands).flatten(-2)
        return torch.cat([p, a.sin(), a.cos()], -1)

    def forward(self, p):
        h = self.mlp(self.encode(p))
        return F.softplus(self.sigma(h).squeeze(-1) - 6), self.rgb(h).sigmoid()


class Renderer(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = Field()

    def forward(self, origin, direction, near=0.5, far=1.5, n=16):
        t = torch.linspace(near, far, n)
        pts = origin[:, None] + direction[:, None] * t[None, :, None]
        sigma, rgb = self.field(pts)
        trans = torch.exp(-sigma * (far - near) / n)
        alpha = 1 - trans
        before = torch.cumprod(torch.cat([torch.ones_like(trans[:, :1]), trans[:, :-1]], 1), 1)
        w = alpha * before
        color = (w[..., None] * rgb).sum(1)
        return color / w.sum(1, keepdim=True)  # FAULT


def main(policy="fp16, scaling.init_scale=128"):
    torch.manual_seed(4)
    model = Renderer()
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)
    amp = mezzo.prepare(model, opt, policy=policy)
    for step in range(5):
        o = torch.randn(64, 3) * 0.1
        d = F.normalize(torch.randn(64, 3), dim=-1)
        target = (d + 1) / 2
        opt.zero_grad()
        loss = F.mse_loss(model(o, d), target)
        amp.backward(loss)
        amp.step()
        print(step, loss.item())


main()
