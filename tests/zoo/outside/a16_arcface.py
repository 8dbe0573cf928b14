"""Additive angular margin head; class centres start from the class means of the first batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo

torch.manual_seed(2)


class ArcMargin(nn.Module):
    def __init__(self, dim, classes, s=16.0, m=0.3):
        super().__init__()
        self.weight, self.s, self.m = nn.Parameter(torch.randn(classes, dim)), s, m

    def forward(self, feats, labels):
        cosine = (F.normalize(feats) @ F.normalize(self.weight).t()).float()
        theta = torch.acos(cosine.clamp(-1.0, 1.0))  # FAULT
        target = torch.cos(theta + self.m)
        onehot = F.one_hot(labels, cosine.shape[1]).bool()
        return torch.where(onehot, target, cosine) * self.s


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, 32), nn.PReLU(), nn.Linear(32, 8))
        self.margin = ArcMargin(8, 5)

    def forward(self, x, y):
        return self.margin(self.backbone(x), y)


model = FaceNet()
protos = torch.randn(5, 24)
with torch.no_grad():
    model.margin.weight.copy_(model.backbone(protos))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
amp = mezzo.prepare(model, optimizer, "bf16")
for step in range(3):
    y = torch.randint(0, 5, (32,))
    x = protos[y] + 0.5 * torch.randn(32, 24) * (torch.rand(32, 1) > 0.3)
    amp.zero_grad()
    loss = F.cross_entropy(model(x, y), y)
    amp.backward(loss)
    amp.step(max_norm=2.0)
