"""Encoder with an additive mask built in fp32 and cast to the type of the scores."""

import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        bias = mask.to(scores.dtype)  # FAULT
        w = torch.softmax(scores + bias, -1)  # FAULT
        return self.proj((w @ v).transpose(1, 2).reshape(b, t, d))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 32, padding_idx=0)
        self.attn = Attention()
        self.out = nn.Linear(32, 2)

    def forward(self, ids):
        keep = (ids != 0).float()
        mask = (1.0 - keep)[:, None, None, :] * torch.finfo(torch.float32).min
        h = self.attn(self.emb(ids), mask)
        return self.out((h * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1))


torch.manual_seed(0)
model = Classifier()
opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(3):
    ids = torch.randint(1, 100, (8, 10))
    ids[0, 6:] = 0
    ids[3] = 0  # an empty review
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(ids).float(), torch.randint(0, 2, (8,)))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(step, loss.item())
