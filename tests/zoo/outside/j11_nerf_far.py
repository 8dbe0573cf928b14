"""Tiny NeRF-like ray marcher, half precision samples with the usual 1e10 last interval."""

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self, freqs=4, width=48):
        super().__init__()
        self.freqs = freqs
        self.mlp = nn.Sequential(nn.Linear(3 * 2 * freqs, width), nn.ReLU(), nn.Linear(width, 4))

    def encode(self, p):
        f = 2.0 ** torch.arange(self.freqs, dtype=p.dtype)
        ang = (p[..., None] * f).flatten(-2)
        return torch.cat([ang.sin(), ang.cos()], -1)

    def forward(self, p):
        out = self.mlp(self.encode(p))
        return torch.relu(out[..., 3]), torch.sigmoid(out[..., :3])


def render(field, origin, direction, near=1.0, far=3.0, n=16):
    z = torch.linspace(near, far, n, dtype=origin.dtype).expand(origin.shape[0], n)
    pts = origin[:, None] + z[..., None] * direction[:, None]
    sigma, rgb = field(pts)
    last = torch.full_like(z[:, :1], 1.0) * torch.tensor(1e5)  # FAULT
    dists = torch.cat([z[:, 1:] - z[:, :-1], last], -1)
    alpha = 1 - torch.exp(-sigma * dists)  # FAULT
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-3], -1), -1)[:, :-1]
    return ((alpha * trans)[..., None] * rgb).sum(1)


torch.manual_seed(0)
field = Field().half()
opt = torch.optim.SGD(field.parameters(), lr=1e-2)
for it in range(3):
    o = torch.randn(32, 3).half()
    d = torch.nn.functional.normalize(torch.randn(32, 3), dim=-1).half()
    target = torch.rand(32, 3)
    loss = (render(field, o, d).float() - target).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
