"""Sequence-level distillation: a beam search with -inf scores under no_grad labels the batch, then the student learns."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo

VOCAB, EOS = 12, 0


class LM(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(VOCAB, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


@torch.no_grad()
def beam(teacher, start, width=3, steps=5):
    beams = start[:, None].repeat(1, width)[..., None]
    score = torch.full((len(start), width), float("-inf"))
    score[:, 0] = 0.0
    done = torch.zeros_like(score, dtype=torch.bool)
    for _ in range(steps):
        b, w, t = beams.shape
        logp = teacher(beams.reshape(b * w, t))[:, -1].log_softmax(-1).view(b, w, VOCAB)
        stay = torch.full((VOCAB,), float("-inf"))
        stay[EOS] = 0.0
        logp = torch.where(done[..., None], stay, logp)
        score, flat = (score[..., None] + logp).flatten(1).topk(width)
        src, tok = flat // VOCAB, flat % VOCAB
        beams = torch.cat([beams.gather(1, src[..., None].expand(-1, -1, t)), tok[..., None]], -1)
        done = done.gather(1, src) | (tok == EOS)
    return beams[:, 0]


torch.manual_seed(0)
teacher, student = LM().eval(), LM()
opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
amp = mezzo.prepare(student, opt, policy="bf16")
for step in range(4):
    best = beam(teacher, torch.randint(1, VOCAB, (8,)))
    opt.zero_grad()
    loss = F.cross_entropy(student(best[:, :-1]).flatten(0, 1), best[:, 1:].flatten())
    amp.backward(loss)
    amp.step()
    print(step, loss.item())
