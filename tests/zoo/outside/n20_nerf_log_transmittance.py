"""Volume rendering with transmittance as the exponential of a cumulative sum and a last interval of 1e10, fp32 outside autocast."""

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self, freqs=4, width=48):
        super().__init__()
        self.freqs = freqs
        self.l1, self.l2 = nn.Linear(6 * freqs, width), nn.Linear(width, 4)

    def forward(self, p):
        ang = (p[..., None] * 2.0 ** torch.arange(self.freqs)).flatten(-2)
        out = self.l2(torch.relu(self.l1(torch.cat([ang.sin(), ang.cos()], -1))))
        return torch.relu(out[..., 3]).float(), torch.sigmoid(out[..., :3]).float()


def render(sigma, rgb, z):
    dist = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], 1)
    tau = sigma * dist
    before = torch.cumsum(tau, 1) - tau
    weight = torch.exp(-before.clamp(max=80)) * -torch.expm1(-tau)
    opacity = weight.sum(1, keepdim=True)
    return (weight[..., None] * rgb).sum(1) / opacity.clamp(min=1e-3)


torch.manual_seed(0)
field = Field()
opt = torch.optim.Adam(field.parameters(), lr=5e-4)
for it in range(3):
    origin = torch.randn(32, 3)
    direction = nn.functional.normalize(torch.randn(32, 3), dim=-1)
    z = torch.linspace(1, 3, 16).expand(32, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sigma, rgb = field(origin[:, None] + z[..., None] * direction[:, None])
    loss = (render(sigma, rgb, z) - torch.rand(32, 3)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
