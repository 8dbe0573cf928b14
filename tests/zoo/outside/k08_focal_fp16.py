"""Focal loss for dense detection, fp16 with a grad scaler; the logarithms are log-sigmoids in fp32."""

import torch
import torch.nn.functional as F
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.cls = nn.Conv2d(16, 4, 1)
        nn.init.constant_(self.cls.bias, -4.6)  # prior of 1 %

    def forward(self, x):
        return self.cls(F.relu(self.stem(x)))


def focal(logits, target, gamma=2.0, alpha=0.25):
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = torch.sigmoid(logits)
    pt = p * target + (1 - p) * (1 - target)
    a = alpha * target + (1 - alpha) * (1 - target)
    return (a * (1 - pt) ** gamma * ce).sum() / target.sum().clamp(min=1)


torch.manual_seed(0)
net = Head()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(4):
    img = torch.rand(4, 3, 16, 16)
    target = (torch.rand(4, 4, 16, 16) < 0.01).float()
    if step == 2:
        target.zero_()  # a batch without objects
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(img)
    loss = focal(logits.float(), target)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
