"""Decoder trained in chunks with a preallocated KV cache: unwritten slots hold NaN and are never attended."""

import math

import torch
from torch import nn


class Cache:
    def __init__(self, b, heads, length, d):
        self.k = torch.full((b, heads, length, d), float("nan"))
        self.v = torch.full((b, heads, length, d), float("nan"))
        self.used = 0

    def append(self, k, v):
        n = k.shape[2]
        self.k[:, :, self.used : self.used + n] = k.detach().float()
        self.v[:, :, self.used : self.used + n] = v.detach().float()
        self.used += n

    def read(self):
        return self.k[:, :, : self.used], self.v[:, :, : self.used]


class Decoder(nn.Module):
    def __init__(self, vocab=30, d=32, heads=4):
        super().__init__()
        self.heads = heads
        self.emb, self.qkv, self.proj, self.head = (
            nn.Embedding(vocab, d),
            nn.Linear(d, 3 * d),
            nn.Linear(d, d),
            nn.Linear(d, vocab),
        )

    def forward(self, ids, cache):
        x = self.emb(ids)
        b, t, d = x.shape
        q, k, v = (s.view(b, t, self.heads, -1).transpose(1, 2) for s in self.qkv(x).chunk(3, -1))
        old_k, old_v = cache.read()
        keys, values = torch.cat([old_k.to(k.dtype), k], 2), torch.cat([old_v.to(v.dtype), v], 2)
        score = q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(t, keys.shape[2], dtype=torch.bool).tril(cache.used)
        score = score.masked_fill(~mask, float("-inf"))
        cache.append(k, v)
        h = (score.softmax(-1) @ values).transpose(1, 2).reshape(b, t, d)
        return self.head(x + self.proj(h))


torch.manual_seed(0)
net = Decoder()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(3):
    ids, cache = torch.randint(0, 30, (4, 25)), Cache(4, 4, 32, 8)
    for start in (0, 8, 16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(ids[:, start : start + 8], cache)
        loss = nn.functional.cross_entropy(logits.float().transpose(1, 2), ids[:, start + 1 : start + 9])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(step, loss.item())
