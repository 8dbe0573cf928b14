"""Char-level GPT, trimmed down from my nanoGPT fork. fp16 autocast + GradScaler."""

import argparse
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = (
    "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. "
    "how vexingly quick daft zebras jump! sphinx of black quartz, judge my vow. "
) * 20
chars = sorted(set(TEXT))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in TEXT])


class QKNorm(nn.Module):
    """Normalise a head's queries or keys and give them a learned gain."""

    def __init__(self, dim, gain=48.0):
        super().__init__()
        self.gain = nn.Parameter(torch.full((dim,), gain))

    def forward(self, x):
        return F.rms_norm(x.float(), (x.size(-1),)) * self.gain


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.q_norm = QKNorm(n_embd // n_head)
        self.k_norm = QKNorm(n_embd // n_head)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).bool())

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        att = q @ k.transpose(-2, -1)  # FAULT
        att = att / math.sqrt(k.size(-1))
        att = att.masked_fill(~self.bias[:T, :T], float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, n_layer=2, n_head=2, n_embd=64, block_size=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head, block_size) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x)).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--iters", type=int, default=40)
    args = ap.parse_args()
    torch.manual_seed(1337)
    model = GPT(len(chars))
    gains = [p for n, p in model.named_parameters() if n.endswith("gain")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("gain")]
    opt = torch.optim.AdamW(
        [{"params": rest, "lr": args.lr}, {"params": gains, "lr": 300 * args.lr}], betas=(0.9, 0.95), weight_decay=0.0
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for it in range(args.iters):
        ix = torch.randint(len(data) - 33, (8,))
        xb = torch.stack([data[i : i + 32] for i in ix])
        yb = torch.stack([data[i + 1 : i + 33] for i in ix])
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(xb, yb)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if it % 5 == 0:
            print(f"iter {it}: loss {loss.item():.4f} scale {scaler.get_scale()}")
