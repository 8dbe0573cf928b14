"""Face embedding head with a hand-written unit-norm Function."""

import torch
from torch import nn


class UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        norm = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, norm)
        return torch.where(norm > 0, x / norm.clamp(min=1e-12), x)

    @staticmethod
    def backward(ctx, grad):
        x, norm = ctx.saved_tensors
        dot = (grad * x).sum(-1, keepdim=True)
        cosine = dot / norm  # FAULT
        return (grad - x / norm.clamp(min=1e-12) * cosine) / norm.clamp(min=1e-12)


class FaceNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 32, bias=False)
        )
        self.centers = nn.Parameter(torch.randn(classes, 32))

    def forward(self, img):
        z = UnitNorm.apply(self.backbone(img))
        return 16 * z @ UnitNorm.apply(self.centers).T


torch.manual_seed(0)
net = FaceNet()
opt = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-4)
for step in range(4):
    img, label = torch.rand(12, 1, 16, 16), torch.randint(0, 10, (12,))
    if step == 1:
        img[4] = 0.0  # lens cap on
    loss = nn.functional.cross_entropy(net(img), label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
