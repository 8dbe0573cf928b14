"""Volume rendering along rays, radiance from a small MLP, in half precision."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


def posenc(x, n=4):
    bands = 2.0 ** torch.arange(n)
    xb = x[..., None] * bands
    return torch.cat([x, xb.sin().flatten(-2), xb.cos().flatten(-2)], -1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(27, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(64, 1), nn.Linear(64, 3)
        nn.init.constant_(self.sigma.bias, 120.0)

    def forward(self, pts):
        h = self.trunk(posenc(pts))
        return self.sigma(h).squeeze(-1), self.rgb(h).sigmoid()


class Renderer(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = Field()

    def forward(self, origins, dirs, samples=24):
        z = torch.linspace(2.0, 6.0, samples)
        pts = origins[:, None] + dirs[:, None] * z[None, :, None]
        sigma, rgb = self.field(pts)
        alpha = 1.0 - torch.exp(-sigma.relu() * (4.0 / samples))
        trans = torch.cumprod(1.0 - alpha + 1e-10, dim=-1)
        weights = alpha * trans / (1.0 - alpha + 1e-10)  # FAULT
        return (weights[..., None] * rgb).sum(1) / weights.sum(-1, keepdim=True)


model = Renderer()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
amp = mezzo.prepare(model, optimizer, "fp16, scaling.init_scale=128")
for it in range(3):
    dirs = nn.functional.normalize(torch.randn(64, 3), dim=-1)
    target = torch.rand(64, 3)
    amp.zero_grad()
    loss = (model(torch.zeros(64, 3), dirs) - target).float().square().mean()
    amp.backward(loss)
    amp.step()
