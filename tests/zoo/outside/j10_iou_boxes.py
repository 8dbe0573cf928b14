"""Box regression head with an IoU loss; a broken annotation and a dead prediction share a point."""

import torch
from torch import nn


def area(b):
    return (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)


def iou(a, b):
    lt = torch.max(a[:, :2], b[:, :2])
    rb = torch.min(a[:, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, 0] * wh[:, 1]
    union = area(a) + area(b) - inter
    return inter / union  # FAULT


class BoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(32, 4)

    def forward(self, img):
        h = self.pool(torch.relu(self.conv(img))).flatten(1)
        c = self.fc(h)
        size = torch.relu(c[:, 2:])  # width and height, may be 0
        return torch.cat([c[:, :2] - size / 2, c[:, :2] + size / 2], 1)


torch.manual_seed(2)
head = BoxHead()
opt = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9)
for step in range(4):
    img = torch.rand(16, 3, 16, 16)
    xy = torch.rand(16, 2)
    gt = torch.cat([xy - 0.3, xy + 0.3], 1)
    if step == 2:
        gt[5, 2:] = gt[5, :2]  # annotator clicked once
        img[5] = 0
        with torch.no_grad():
            head.fc.bias[2:] = -0.5
    loss = (1 - iou(head(img), gt)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("iteration", step, "loss", loss.item())
