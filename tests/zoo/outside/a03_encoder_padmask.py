"""Sentence encoder with padded batches; the additive mask is made once, outside the model."""

import torch
import torch.nn as nn

torch.manual_seed(3)


def collate(lengths, width=12):
    keep = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 50, (len(lengths), width)) * keep
    return ids, (1.0 - keep.float()) * torch.finfo(torch.float32).min


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = q @ k.transpose(1, 2) * x.shape[-1] ** -0.5
        scores = scores + mask[:, None].to(scores.dtype)  # FAULT
        return self.out(scores.softmax(-1) @ v)


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed, self.attn, self.head = nn.Embedding(50, dim), Attention(dim), nn.Linear(dim, 2)

    def forward(self, ids, mask):
        h = self.embed(ids)
        h = h + self.attn(h, mask)
        return self.head(h.mean(1))


model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
criterion = nn.CrossEntropyLoss()
for step, lengths in enumerate([[5, 7, 12, 3], [4, 0, 9, 12], [6, 6, 1, 2]]):
    ids, mask = collate(lengths)
    target = torch.randint(0, 2, (4,))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(ids, mask).float(), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
