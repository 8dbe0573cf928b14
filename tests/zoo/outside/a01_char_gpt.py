"""Character GPT on a few lines of text, after the one-file tutorials."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo

torch.manual_seed(1337)
text = "to be or not to be that is the question whether tis nobler in the mind to suffer " * 20
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
block_size, n_embd, n_head, batch_size = 32, 64, 4, 8


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))
        nn.init.normal_(self.c_attn.weight, std=1.0)
        nn.init.normal_(self.c_proj.weight, std=0.02)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q = q.view(B, T, n_head, C // n_head).transpose(1, 2) * 12.0
        k = k.view(B, T, n_head, C // n_head).transpose(1, 2) * 12.0
        v = v.view(B, T, n_head, C // n_head).transpose(1, 2)
        att = q @ k.transpose(-2, -1)  # FAULT
        att = att / math.sqrt(C // n_head)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), CausalSelfAttention()
        self.ln_2, self.mlp = (
            nn.LayerNorm(n_embd),
            nn.Sequential(nn.Linear(n_embd, 128), nn.GELU(), nn.Linear(128, n_embd)),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
amp = mezzo.prepare(model, optimizer, "fp16")
for it in range(4):
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    amp.zero_grad()
    amp.backward(model(x, y))
    amp.step(max_norm=1.0)
    print(f"iter {it}")
