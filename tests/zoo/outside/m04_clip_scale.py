"""CLIP-like contrastive training; the learned temperature was loaded from a long run and is not clamped."""

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, d_in, d=16):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_in, 64), nn.Linear(64, d)

    def forward(self, x):
        return F.normalize(self.fc2(F.gelu(self.fc1(x))), dim=-1)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(48), Tower(24)
        self.logit_scale = nn.Parameter(torch.tensor(12.6))

    def forward(self, img, txt):
        i, t = self.image(img), self.text(txt)
        scaled = self.logit_scale.exp() * i  # FAULT
        return scaled @ t.t()


def contrastive(logits):
    labels = torch.arange(len(logits))
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))


torch.manual_seed(0)
model = CLIP()
decay = [p for n, p in model.named_parameters() if p.ndim > 1]
other = [p for n, p in model.named_parameters() if p.ndim <= 1]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.2}, {"params": other, "weight_decay": 0.0}], lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(torch.randn(16, 48), torch.randn(16, 24))
    loss = contrastive(logits.float())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(step, loss.item())
