"""CLIP-style contrastive pretraining; the temperature was resumed from another run."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        return self.proj(self.patch(x).flatten(2).mean(-1))


class TextTower(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, ids):
        return self.proj(self.emb(ids))


class CLIP(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.visual, self.text = ImageTower(dim), TextTower(100, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, images, ids):
        i = F.normalize(self.visual(images), dim=-1)
        t = F.normalize(self.text(ids), dim=-1)
        scaled = self.logit_scale.exp() * i  # FAULT
        return scaled @ t.T


def clip_loss(logits):
    target = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def run():
    torch.manual_seed(8)
    model = CLIP()
    model.load_state_dict({"logit_scale": torch.tensor(12.6)}, strict=False)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    amp = mezzo.prepare(model, opt, policy="fp16, scaling.init_scale=16")
    for step in range(4):
        images, ids = torch.rand(16, 3, 16, 16), torch.randint(0, 100, (16, 8))
        opt.zero_grad(set_to_none=True)
        loss = clip_loss(model(images, ids))
        amp.backward(loss)
        amp.step()
        print(f"step {step} loss {loss.item():.4f} scale {model.logit_scale.item():.3f}")


run()
