"""Language model whose loss is divided by the number of kept tokens, counted in the model's own bf16."""

import torch
from torch import nn

torch.manual_seed(0)


class TinyLM(nn.Module):
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.emb, self.mix, self.out = nn.Embedding(vocab, dim), nn.Linear(dim, dim), nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(torch.relu(self.mix(self.emb(ids))))


def positions(keep):
    return torch.cumsum(keep.to(torch.bfloat16), dim=1) - 1  # FAULT


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm, self.pos = TinyLM(), nn.Embedding(1024, 50)

    def forward(self, ids, keep):
        where = positions(keep).clamp(min=0).long()
        return self.lm(ids) + self.pos(where)


model = Learned()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    ids = torch.randint(0, 50, (2, 700))
    keep = torch.ones(2, 700, dtype=torch.bool)
    keep[1, :100] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids, keep)
    losses = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    kept = keep[:, 1:].flatten().float()
    loss = (losses * kept).sum() / kept.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
