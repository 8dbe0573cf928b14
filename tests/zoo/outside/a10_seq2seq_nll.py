"""Copy task, GRU; negative log-likelihood from probabilities."""

import torch
import torch.nn as nn

import mezzo


class Copier(nn.Module):
    def __init__(self, vocab=12, dim=32):
        super().__init__()
        self.emb, self.rnn, self.out = (
            nn.Embedding(vocab, dim),
            nn.GRU(dim, dim, batch_first=True),
            nn.Linear(dim, vocab),
        )

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h) * 14.0


class NLL(nn.Module):
    def forward(self, logits, target):
        probs = torch.softmax(logits, dim=-1)
        picked = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return -picked.log().mean()  # FAULT


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.copier, self.criterion = Copier(), NLL()

    def forward(self, x):
        return self.criterion(self.copier(x), x)


torch.manual_seed(4)
model = Seq2Seq()
with torch.no_grad():
    model.copier.out.weight.mul_(6)
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
amp = mezzo.prepare(model, opt, "fp16, scaling.init_scale=512")
for i in range(3):
    x = torch.randint(0, 12, (32, 10))
    amp.zero_grad()
    amp.backward(model(x))
    amp.step(max_norm=5.0)
