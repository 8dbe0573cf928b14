"""Linear-chain CRF with forbidden transitions (-inf) and logsumexp."""

import torch
from torch import nn

import mezzo

torch.manual_seed(2)
TAGS = 5


class CRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.trans = nn.Parameter(torch.randn(TAGS, TAGS) * 0.1)
        allowed = torch.ones(TAGS, TAGS, dtype=torch.bool)
        allowed[0, 2] = allowed[3, 1] = False
        self.register_buffer("forbid", torch.where(allowed, 0.0, float("-inf")))

    def forward(self, emit, tags):
        trans = self.trans + self.forbid
        alpha = emit[:, 0]
        gold = emit[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emit.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + trans[None], dim=1) + emit[:, t]
            gold = gold + trans[tags[:, t - 1], tags[:, t]] + emit[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
        return (torch.logsumexp(alpha, dim=1) - gold).mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out, self.crf = (
            nn.Embedding(40, 24),
            nn.GRU(24, 24, batch_first=True),
            nn.Linear(24, TAGS),
            CRF(),
        )

    def forward(self, ids, tags):
        return self.crf(self.out(self.rnn(self.emb(ids))[0]).float(), tags)


def legal(b, t):
    tags = torch.randint(0, TAGS, (b, t))
    for i in range(1, t):
        tags[:, i] = torch.where(
            (tags[:, i - 1] == 0) & (tags[:, i] == 2) | (tags[:, i - 1] == 3) & (tags[:, i] == 1), 4, tags[:, i]
        )
    return tags


model = Tagger()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
amp = mezzo.prepare(model, opt, "bf16")
for step in range(4):
    amp.zero_grad()
    loss = model(torch.randint(0, 40, (8, 9)), legal(8, 9))
    amp.backward(loss)
    amp.step()
    print(step, float(loss.detach()))
