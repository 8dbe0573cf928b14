"""Contrastive image-text pretraining with a learnable temperature restored from a run that diverged."""

import torch
import torch.nn.functional as F
from torch import nn

import mezzo

torch.manual_seed(0)


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.patch, self.proj = nn.Conv2d(3, 32, 4, stride=4), nn.Linear(32, dim)

    def forward(self, x):
        return self.proj(self.patch(x).relu().mean((2, 3)))


class TextTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.tok, self.proj = nn.Embedding(64, 32), nn.Linear(32, dim)

    def forward(self, ids):
        return self.proj(self.tok(ids).mean(1))


class CLIP(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.visual, self.text = ImageTower(dim), TextTower(dim)
        self.logit_scale = nn.Parameter(torch.tensor(12.2))

    def forward(self, image, ids):
        i = F.normalize(self.visual(image), dim=-1)
        t = F.normalize(self.text(ids), dim=-1)
        logits = self.logit_scale.exp() * (i @ t.t())  # FAULT
        labels = torch.arange(len(i))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


model = CLIP()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.2)
amp = mezzo.prepare(model, opt, "fp16, scaling.init_scale=64")
for step in range(3):
    amp.zero_grad()
    amp.backward(model(torch.randn(16, 3, 16, 16), torch.randint(0, 64, (16, 8))))
    amp.step()
