"""Box regression by generalised IoU with degenerate predictions allowed; areas carry an eps."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


def giou(a, b, eps=1e-7):
    lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    area_a, area_b = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    union = area_a + area_b - inter
    hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).prod(1)
    return inter / (union + eps) - (hull - union) / (hull + eps)


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten()
        )
        self.box = nn.Linear(72, 4)

    def forward(self, x):
        centre, size = self.box(self.backbone(x)).float().sigmoid().chunk(2, dim=1)
        return torch.cat([centre - size / 2, centre + size / 2], 1)


def sample(n):
    centre, size = torch.rand(n, 2) * 0.6 + 0.2, torch.rand(n, 2) * 0.3 + 0.05
    return torch.cat([centre - size / 2, centre + size / 2], 1)


model = BoxNet()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    boxes = sample(16)
    pred = model(torch.randn(16, 1, 20, 20))
    amp.zero_grad()
    amp.backward((1 - giou(pred, boxes)).mean() + nn.functional.l1_loss(pred, boxes))
    amp.step(max_norm=0.1)
