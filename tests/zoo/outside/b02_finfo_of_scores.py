"""Encoder with an fp16 region; the mask takes the smallest number of the scores' own type."""

import torch
from torch import nn

torch.manual_seed(3)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, keep):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = q @ k.transpose(1, 2) * x.shape[-1] ** -0.5
        scores = scores.masked_fill(~keep[:, None], torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed, self.attn, self.head = nn.Embedding(50, dim), Attention(dim), nn.Linear(dim, 2)

    def forward(self, ids, keep):
        h = self.embed(ids)
        return self.head((h + self.attn(h, keep)).mean(1))


model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step, lengths in enumerate([[5, 7, 12, 3], [4, 0, 9, 12], [6, 6, 1, 2]]):
    keep = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 50, (4, 12)) * keep
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(ids, keep).float(), torch.randint(0, 2, (4,)))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, round(loss.item(), 4))
