"""Set transformer-ish pooling: max over valid points with -inf padding, attention over valid points only, log1p features."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class SetEncoder(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, d), nn.GELU(), nn.Linear(d, d))
        self.score = nn.Linear(d, 1)
        self.rho = nn.Linear(2 * d, 5)

    def forward(self, pts, valid):
        h = self.phi(torch.log1p(pts.abs()) * pts.sign())
        hidden = ~valid[..., None]
        top = h.masked_fill(hidden, -torch.inf).amax(1)
        w = self.score(h).masked_fill(hidden, -torch.inf).softmax(1)
        return self.rho(torch.cat([top, (w * h).sum(1)], -1))


def cloud(n, most=10):
    lengths = torch.randint(1, most + 1, (n,))
    valid = torch.arange(most)[None] < lengths[:, None]
    return torch.randn(n, most, 3) * 5 * valid[..., None], valid


torch.manual_seed(0)
model = SetEncoder()
opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
amp = mezzo.prepare(model, opt, policy="bf16")
for i in range(5):
    pts, valid = cloud(32)
    y = torch.randint(0, 5, (32,))
    opt.zero_grad()
    loss = F.cross_entropy(model(pts, valid), y)
    amp.backward(loss)
    amp.step()
    print(i, loss.item())
