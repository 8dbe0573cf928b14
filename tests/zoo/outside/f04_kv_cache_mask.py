"""Fine-tune a tiny decoder on left-padded prompts; the mask comes from the collator in fp32."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo

VOCAB, DIM, HEADS = 64, 32, 4


class CachedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, bias, past=None):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores + bias.to(scores.dtype)  # FAULT
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, DIM)), (k, v)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.attn = nn.Embedding(VOCAB, DIM), CachedAttention()
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids, bias):
        x = self.emb(ids)
        half = ids.shape[1] // 2
        a, past = self.attn(x[:, :half], bias[..., :half, :half])
        c, _ = self.attn(x[:, half:], bias[..., half:, :], past)
        return self.head(self.norm(x + torch.cat([a, c], 1)))


def collate(lengths, t):
    pad = torch.arange(t)[None] < (t - lengths)[:, None]
    causal = torch.ones(t, t).triu(1).bool()
    hidden = causal[None] | pad[:, None, :]
    return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[:, None], pad


torch.manual_seed(0)
model = Decoder()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="fp16, scaling.init_scale=1024")
for step in range(5):
    ids = torch.randint(0, VOCAB, (4, 12))
    bias, pad = collate(torch.tensor([12, 9, 7, 10]), 12)
    labels = ids.masked_fill(pad, -100)
    opt.zero_grad()
    logits = model(ids, bias)
    amp.backward(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    amp.step(max_norm=1.0)
    print(step, logits.detach().abs().max().item())
