"""A decoder with a KV cache: a few training steps, then sampling with top-k filtering by -inf."""

import torch
from torch import nn

import mezzo

torch.manual_seed(0)


class CachedAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, cache=None):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.o(weights @ v), (k, v)


class LM(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.emb, self.attn, self.out = nn.Embedding(vocab, dim), CachedAttention(dim), nn.Linear(dim, vocab)

    def forward(self, ids, cache=None):
        h = self.emb(ids)
        a, cache = self.attn(h, cache)
        return self.out(h + a), cache


@torch.no_grad()
def sample(model, n=6, k=5):
    ids, cache, out = torch.zeros(1, 1, dtype=torch.long), None, []
    for _ in range(n):
        logits, cache = model(ids, cache)
        last = logits[:, -1].float()
        kth = last.topk(k).values[:, -1:]
        probs = last.masked_fill(last < kth, float("-inf")).softmax(-1)
        ids = torch.multinomial(probs, 1)
        out.append(ids.item())
    return out


model = LM()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(3):
    ids = torch.randint(0, 40, (8, 12))
    amp.zero_grad()
    logits, _ = model(ids[:, :-1])
    amp.backward(nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()))
    amp.step()
print(sample(model))
