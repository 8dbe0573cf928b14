"""Box regression with an IoU loss; a few annotations are points (clicks), and ReLU clamps the predicted sizes."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.center, self.size = nn.Linear(32, 2), nn.Linear(32, 2)
        nn.init.constant_(self.center.bias, 0.4)
        nn.init.constant_(self.size.bias, 0.3)
        nn.init.normal_(self.size.weight, std=0.2)

    def forward(self, x):
        h = self.body(x)
        c, s = self.center(h), F.relu(self.size(h))
        return torch.cat([c - s / 2, c + s / 2], -1)


def area(b):
    return (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])


def iou(a, b):
    lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, 0] * wh[:, 1]
    return inter / (area(a) + area(b) - inter)  # FAULT


def annotations(n, clicks):
    tl = torch.rand(n, 2) * 0.5
    wh = torch.rand(n, 2) * 0.4 + 0.1
    wh[:clicks] = 0.0
    return torch.cat([tl, tl + wh], 1)


torch.manual_seed(3)
net = BoxNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
amp = mezzo.prepare(net, opt, policy="fp32")
for step in range(5):
    x, gt = torch.randn(64, 16), annotations(64, 16 if step == 1 else 0)
    opt.zero_grad()
    loss = (1 - iou(net(x), gt)).mean()
    amp.backward(loss)
    amp.step()
    print(step, loss.item())
