"""Single-stage detector head: regression targets relative to anchors; annotations hold a degenerate box."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mezzo

ANCHOR = torch.tensor([[4.0, 4.0, 6.0, 6.0], [12.0, 4.0, 6.0, 6.0], [4.0, 12.0, 6.0, 6.0], [12.0, 12.0, 6.0, 6.0]])


def encode(boxes, anchors):
    xy = (boxes[:, :2] - anchors[:, :2]) / anchors[:, 2:]
    wh = torch.log(boxes[:, 2:] / anchors[:, 2:])  # FAULT
    return torch.cat([xy, wh], dim=1)


class Shapes(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        centre = torch.rand(4, 2, generator=g) * 16
        size = torch.rand(4, 2, generator=g) * 5 + 1
        if i == 19:
            size[2, 0] = 0.0
        return torch.randn(3, 16, 16, generator=g), torch.cat([centre, size], 1)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.reg = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        return self.reg(self.features(x)).flatten(2).transpose(1, 2)


torch.manual_seed(0)
model = Head()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
amp = mezzo.prepare(model, optimizer, "bf16")
for images, boxes in DataLoader(Shapes(), batch_size=8):
    targets = torch.stack([encode(b, ANCHOR) for b in boxes])
    amp.zero_grad()
    amp.backward(nn.functional.smooth_l1_loss(model(images).float(), targets))
    amp.step()
