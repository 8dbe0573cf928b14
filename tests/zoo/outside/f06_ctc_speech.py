"""Small speech recogniser with CTC; subsampling by four."""

import torch
import torch.nn as nn

import mezzo


class ASR(nn.Module):
    def __init__(self, n_mels=20, hidden=32, vocab=12):
        super().__init__()
        self.sub = nn.Sequential(
            nn.Conv1d(n_mels, hidden, 3, 2, 1), nn.GELU(), nn.Conv1d(hidden, hidden, 3, 2, 1), nn.GELU()
        )
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, vocab)

    def forward(self, feats, feat_lens):
        h, _ = self.rnn(self.sub(feats.transpose(1, 2)).transpose(1, 2))
        return self.head(h), (feat_lens + 3) // 4


def batch(gen, frames, chars):
    feats = torch.randn(len(frames), max(frames), 20, generator=gen)
    targets = torch.randint(1, 12, (len(chars), max(chars)), generator=gen)
    return feats, torch.tensor(frames), targets, torch.tensor(chars)


def main():
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(5)
    model = ASR()
    criterion = nn.CTCLoss(blank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    amp = mezzo.prepare(model, optimizer, policy="bf16")
    data = [
        batch(gen, [80, 64, 72], [9, 6, 8]),
        batch(gen, [60, 48, 64], [7, 5, 8]),
        batch(gen, [80, 24, 72], [9, 11, 8]),  # somebody speaks very fast
        batch(gen, [64, 64, 72], [6, 6, 8]),
    ]
    for epoch in range(2):
        for feats, feat_lens, targets, target_lens in data:
            optimizer.zero_grad()
            logits, out_lens = model(feats, feat_lens)
            log_probs = logits.log_softmax(-1).transpose(0, 1)
            loss = criterion(log_probs, targets, out_lens, target_lens)  # FAULT
            amp.backward(loss)
            amp.step(max_norm=5.0)
            print(f"epoch {epoch} ctc {loss.item():.3f}")


main()
