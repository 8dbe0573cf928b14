"""Tiny speech recogniser: subsampling convolution and CTC."""

import torch
from torch import nn

import mezzo


class Recogniser(nn.Module):
    def __init__(self, mels=20, vocab=16):
        super().__init__()
        self.sub = nn.Sequential(
            nn.Conv1d(mels, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(32, 32, 3, stride=2, padding=1), nn.ReLU()
        )
        self.rnn = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, vocab)

    def forward(self, feats):
        h = self.sub(feats.transpose(1, 2)).transpose(1, 2)
        return self.head(self.rnn(h)[0]).float().log_softmax(-1)


def fake_corpus(n, seed=2):
    g = torch.Generator().manual_seed(seed)
    for i in range(n):
        feats = torch.randn(4, 48, 20, generator=g)
        lengths = torch.tensor([5, 4, 6, 7]) if i != 2 else torch.tensor([5, 14, 6, 7])
        targets = torch.randint(1, 16, (4, 14), generator=g)
        yield feats, targets, lengths


torch.manual_seed(0)
model = Recogniser()
criterion = nn.CTCLoss(blank=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
amp = mezzo.prepare(model, optimizer, "bf16")
for step, (feats, targets, target_lengths) in enumerate(fake_corpus(5)):
    log_probs = model(feats)
    input_lengths = torch.full((4,), log_probs.shape[1])
    loss = criterion(log_probs.transpose(0, 1), targets, input_lengths, target_lengths)  # FAULT
    amp.zero_grad()
    amp.backward(loss)
    amp.step(max_norm=5.0)
    print(step)
