"""Causal attention with -inf masks under bf16; every row keeps its own position."""

import math

import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, d, heads, ctx):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("mask", torch.triu(torch.full((ctx, ctx), float("-inf")), 1))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (s.view(b, t, self.heads, -1).transpose(1, 2) for s in self.qkv(x).chunk(3, -1))
        att = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads) + self.mask[:t, :t]
        return self.out((att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, ctx):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = CausalAttention(d, 4, ctx)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, vocab=60, d=32, ctx=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.blocks = nn.Sequential(Block(d, ctx), Block(d, ctx))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.head(self.blocks(self.tok(ids) + self.pos(torch.arange(ids.shape[1]))))


torch.manual_seed(0)
net = GPT()
opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
for step in range(4):
    ids = torch.randint(0, 60, (8, 25))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
