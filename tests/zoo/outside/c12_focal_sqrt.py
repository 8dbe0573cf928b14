"""Dense detection with a focal loss of gamma 0.5 computed in bf16."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class Focal(nn.Module):
    def __init__(self, gamma=0.5, alpha=0.25):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, logits, target):
        p = torch.sigmoid(logits)
        pt = torch.where(target > 0, p, 1 - p)
        weight = (1 - pt).pow(self.gamma)  # FAULT
        return -(self.alpha * weight * torch.log(pt.clamp(min=1e-4))).float().mean()


class Heatmap(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))
        self.focal = Focal()

    def forward(self, x, target):
        return self.focal(self.net(x).squeeze(1), target)


model = Heatmap()
with torch.no_grad():
    model.net[2].bias.fill_(7.0)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(3):
    x = torch.randn(4, 3, 12, 12)
    target = (torch.rand(4, 12, 12) < 0.9).float()
    amp.zero_grad()
    amp.backward(model(x, target))
    amp.step()
    print(step)
