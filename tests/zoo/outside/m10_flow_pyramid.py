"""Optical flow over an image pyramid; the coarsest level is one pixel wide."""

import torch
import torch.nn.functional as F
from torch import nn


def warp(img, flow):
    _, _, h, w = img.shape
    yy, xx = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    gx = xx.float() + flow[:, 0]
    gy = yy.float() + flow[:, 1]
    gx = 2 * gx / (w - 1) - 1  # FAULT
    gy = 2 * gy / max(h - 1, 1) - 1
    return F.grid_sample(img, torch.stack([gx, gy], -1), align_corners=True)


class FlowNet(nn.Module):
    def __init__(self, levels=4):
        super().__init__()
        self.levels = levels
        self.estimators = nn.ModuleList(nn.Conv2d(4, 2, 3, padding=1) for _ in range(levels))

    def forward(self, a, b):
        pyramid = [(a, b)]
        for _ in range(self.levels - 1):
            pyramid.append(tuple(F.avg_pool2d(i, 2) for i in pyramid[-1]))
        flow, terms = None, []
        for est, (x, y) in zip(self.estimators, reversed(pyramid)):
            if flow is None:
                flow = x.new_zeros(x.shape[0], 2, *x.shape[2:])
            else:
                flow = 2 * F.interpolate(flow, size=x.shape[2:], mode="nearest")
            flow = flow + est(torch.cat([x, warp(y, flow), flow], 1))
            terms.append((x - warp(y, flow)).abs().mean())
        return flow, terms


torch.manual_seed(0)
net = FlowNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for it in range(2):
    a = torch.rand(2, 1, 16, 8)
    b = a.roll(1, -1)
    flow, terms = net(a, b)
    loss = sum(terms) + 0.01 * flow.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
