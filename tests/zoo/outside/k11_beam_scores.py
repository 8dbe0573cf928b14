"""Sequence model trained with teacher forcing and sampled with top-k filtering (-inf logits) and a beam of -inf scores."""

import torch
from torch import nn


class Seq(nn.Module):
    def __init__(self, vocab=30, d=32):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(vocab, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, vocab)

    def forward(self, ids, h=None):
        y, h = self.rnn(self.emb(ids), h)
        return self.out(y), h


@torch.no_grad()
def sample(net, start, n=6, k=5):
    ids, h, cur = [], None, start
    for _ in range(n):
        logits, h = net(cur, h)
        logits = logits[:, -1].float()
        kth = logits.topk(k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
        cur = torch.multinomial(logits.softmax(-1), 1)
        ids.append(cur)
    return torch.cat(ids, 1)


@torch.no_grad()
def beam(net, start, width=3, n=5):
    score = torch.full((width,), float("-inf"))
    score[0] = 0.0
    seqs = start.expand(width, 1)
    for _ in range(n):
        logp = net(seqs)[0][:, -1].float().log_softmax(-1)
        total = score[:, None] + logp
        score, flat = total.flatten().topk(width)
        seqs = torch.cat([seqs[flat // logp.shape[1]], (flat % logp.shape[1])[:, None]], 1)
    return seqs[0]


torch.manual_seed(0)
net = Seq()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
for step in range(4):
    ids = torch.randint(0, 30, (8, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, _ = net(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item(), sample(net, ids[:2, :1]).tolist(), beam(net, ids[:1, :1]).tolist())
