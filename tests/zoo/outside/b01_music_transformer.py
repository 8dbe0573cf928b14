"""Decoder on note events: causal mask of -inf and a mask of padded keys, softmax by hand."""

import torch
from torch import nn

import mezzo


class MaskedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x, pad):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (d // self.heads) ** -0.5
        causal = torch.full((t, t), float("-inf")).triu(1)
        scores = scores + causal.to(scores.dtype)
        scores = scores.masked_fill(pad[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self, vocab=90, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.attn, self.norm = MaskedAttention(dim, 4), nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        h = self.norm(h + self.attn(h, ids == 0))
        return self.out(h)


torch.manual_seed(0)
model = Decoder()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    ids = torch.randint(1, 90, (8, 20))
    ids[::2, 15:] = 0
    amp.zero_grad()
    logits = model(ids[:, :-1]).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
    amp.backward(loss)
    amp.step(max_norm=1.0)
