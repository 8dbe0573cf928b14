"""Radiance field: network in bf16, compositing in fp32 with the usual 1e-10."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(27, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(64, 1), nn.Linear(64, 3)
        self.register_buffer("bands", 2.0 ** torch.arange(4))

    def forward(self, pts):
        xb = pts[..., None] * self.bands
        h = self.trunk(torch.cat([pts, xb.sin().flatten(-2), xb.cos().flatten(-2)], -1))
        return self.sigma(h).squeeze(-1).float(), self.rgb(h).sigmoid().float()


def render(field, origins, dirs, n=24):
    z = torch.linspace(2.0, 6.0, n)
    sigma, rgb = field(origins[:, None] + dirs[:, None] * z[None, :, None])
    delta = torch.cat([z[1:] - z[:-1], torch.tensor([1e10])])
    alpha = 1.0 - torch.exp(-torch.relu(sigma) * delta)
    ones = torch.ones(alpha.shape[0], 1)
    trans = torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * trans
    depth = (weights * z).sum(-1)
    disparity = 1.0 / torch.max(torch.full_like(depth, 1e-10), depth / (weights.sum(-1) + 1e-10))
    return (weights[..., None] * rgb).sum(1), disparity.detach()


model = Field()
opt = torch.optim.Adam(model.parameters(), lr=5e-4)
amp = mezzo.prepare(model, opt, "bf16")
for it in range(4):
    dirs = nn.functional.normalize(torch.randn(64, 3), dim=-1)
    colour, _ = render(model, torch.zeros(64, 3), dirs)
    amp.zero_grad()
    amp.backward((colour - torch.rand(64, 3)).square().mean())
    amp.step()
