"""Linear-chain CRF tagger; forbidden transitions are -1e4 and start/stop states -inf free (logsumexp in fp32)."""

import torch
import torch.nn as nn

import mezzo


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.trans = nn.Parameter(torch.randn(tags, tags) * 0.1)
        forbidden = torch.zeros(tags, tags)
        forbidden[0, 2] = forbidden[3, 1] = float("-inf")  # I-x must not follow O
        self.register_buffer("forbidden", forbidden)

    def forward(self, emit, tags):
        emit, trans = emit.float(), self.trans.float() + self.forbidden
        alpha, gold = emit[:, 0], emit[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emit.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + trans[None], 1) + emit[:, t]
            gold = gold + emit[:, t].gather(1, tags[:, t : t + 1]).squeeze(1) + self.trans[tags[:, t - 1], tags[:, t]]
        return (torch.logsumexp(alpha, 1) - gold).mean()


class Tagger(nn.Module):
    def __init__(self, vocab=40, d=24, tags=4):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, d), nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.fc, self.crf = nn.Linear(2 * d, tags), CRF(tags)

    def forward(self, ids, tags):
        return self.crf(self.fc(self.rnn(self.emb(ids))[0]), tags)


torch.manual_seed(0)
model = Tagger()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
amp = mezzo.prepare(model, opt, policy="bf16")
for step in range(4):
    ids = torch.randint(0, 40, (8, 10))
    tags = (ids % 2) * 3 * (ids > 20)  # only tags 0 and 3
    opt.zero_grad()
    loss = model(ids, tags)
    amp.backward(loss)
    amp.step(max_norm=5.0)
    print(step, loss.item())
