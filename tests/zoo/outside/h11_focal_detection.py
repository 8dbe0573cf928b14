"""Anchor-based detector head; some images have no object, losses are divided by max(n, 1)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Head(nn.Module):
    def __init__(self, ch=16, anchors=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, ch, 3, 2, 1), nn.GroupNorm(4, ch), nn.ReLU())
        self.cls, self.box = nn.Conv2d(ch, anchors, 1), nn.Conv2d(ch, anchors * 4, 1)
        nn.init.constant_(self.cls.bias, -4.6)

    def forward(self, x):
        f = self.stem(x)
        return self.cls(f).flatten(1), self.box(f).view(len(x), -1, 4)


def focal(logit, target, gamma=2.0):
    ce = F.binary_cross_entropy_with_logits(logit, target, reduction="none")
    return (ce * (1 - torch.exp(-ce)) ** gamma).sum()


def giou(a, b):
    lt, rb = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    union = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inter
    return 1 - inter / (union + 1e-6)


torch.manual_seed(0)
net = Head()
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
amp = mezzo.prepare(net, opt, policy="fp16, scaling.init_scale=64")
for step, count in enumerate([12, 5, 0, 7]):
    images = torch.rand(2, 3, 16, 16)
    opt.zero_grad()
    logits, boxes = net(images)
    target = torch.zeros_like(logits)
    target.view(-1)[:count] = 1
    picked = boxes.reshape(-1, 4)[:count]
    pred = torch.cat([picked[:, :2].sigmoid() * 0.5, 0.5 + picked[:, 2:].sigmoid() * 0.5], 1)
    truth = torch.tensor([0.2, 0.2, 0.7, 0.8]).expand(count, 4)
    loss = (focal(logits, target) + giou(pred, truth).sum()) / max(count, 1)
    amp.backward(loss)
    amp.step(max_norm=10.0)
    print(step, count, loss.item())
