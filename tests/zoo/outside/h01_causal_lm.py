"""Tiny GPT with a -inf causal mask and padding."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Block(nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, pad):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        att = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        hide = torch.ones(t, t, dtype=torch.bool).triu(1) | pad[:, None, None, :]
        att = att.masked_fill(hide, float("-inf")).softmax(-1)
        x = x + self.proj((att @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=60, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(32, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, pad):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, pad)
        return self.head(x)


torch.manual_seed(0)
model = GPT()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, policy="fp16, scaling.init_scale=512")
for step in range(5):
    ids = torch.randint(0, 60, (4, 16))
    lengths = torch.tensor([16, 12, 9, 5])
    pad = torch.arange(16)[None] >= lengths[:, None]  # right padding: position 0 is always seen
    labels = ids.masked_fill(pad, -100)
    opt.zero_grad()
    loss = F.cross_entropy(model(ids, pad)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, loss.item())
