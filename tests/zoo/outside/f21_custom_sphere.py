"""Hyperspherical embedding with a hand-written autograd Function for the projection."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class ToSphere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        norm = x.norm(dim=-1, keepdim=True)
        y = torch.where(norm > 0, x / norm.clamp(min=1e-6), torch.zeros_like(x))
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, norm = ctx.saved_tensors
        tangent = grad - (grad * y).sum(-1, keepdim=True) * y
        return tangent / norm  # FAULT


class Encoder(nn.Module):
    def __init__(self, vocab=50, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.lin = nn.Linear(dim, dim, bias=False)

    def forward(self, ids):
        return ToSphere.apply(self.lin(self.emb(ids)))


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = Encoder(), nn.Linear(16, 5)

    def forward(self, ids):
        return self.head(self.enc(ids).mean(1))


torch.manual_seed(3)
model = Scorer()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
amp = mezzo.prepare(model, opt, policy="fp32")
for step in range(4):
    ids = torch.randint(1, 50, (32, 7))
    if step >= 1:
        ids[:5, -2:] = 0  # padding
    opt.zero_grad()
    loss = F.cross_entropy(model(ids), torch.randint(0, 5, (32,)))
    amp.backward(loss)
    amp.step()
    print(step, loss.item())
