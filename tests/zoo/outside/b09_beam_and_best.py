"""Captioning: trains a step, then decodes with a beam whose unused rows are -inf."""

import torch
from torch import nn

import mezzo

torch.manual_seed(4)
VOCAB, EOS, BEAM = 30, 1, 3


class Captioner(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.image, self.emb = nn.Linear(64, dim), nn.Embedding(VOCAB, dim)
        self.rnn, self.out = nn.GRUCell(dim, dim), nn.Linear(dim, VOCAB)

    def forward(self, feats, ids):
        h, logits = torch.tanh(self.image(feats)), []
        for t in range(ids.shape[1]):
            h = self.rnn(self.emb(ids[:, t]), h)
            logits.append(self.out(h))
        return torch.stack(logits, 1), h


@torch.no_grad()
def beam_search(model, feats, steps=6):
    scores = torch.full((BEAM,), float("-inf"))
    scores[0] = 0.0
    seqs = torch.zeros(BEAM, 1, dtype=torch.long)
    for _ in range(steps):
        logits, _ = model(feats.expand(BEAM, -1), seqs)
        total = scores[:, None] + logits[:, -1].float().log_softmax(-1)
        scores, flat = total.flatten().topk(BEAM)
        seqs = torch.cat([seqs[flat // VOCAB], (flat % VOCAB)[:, None]], 1)
    return seqs[0], scores


model = Captioner()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
amp = mezzo.prepare(model, opt, "bf16")
best = torch.tensor(float("inf"))
for step in range(3):
    model.train()
    feats, ids = torch.randn(8, 64), torch.randint(2, VOCAB, (8, 7))
    amp.zero_grad()
    logits, _ = model(feats, ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    amp.backward(loss)
    amp.step()
    best = torch.minimum(best, loss.detach())
    model.eval()
    seq, scores = beam_search(model, torch.randn(1, 64))
    print(step, seq.tolist(), scores.tolist())
