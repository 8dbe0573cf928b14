"""Char-level MLP language model, 'just call .half()'."""

import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = "the quick brown fox jumps over the lazy dog. " * 20


class CharMLP(nn.Module):
    def __init__(self, vocab, ctx=6, dim=12, hidden=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.fc1, self.fc2 = nn.Linear(ctx * dim, hidden), nn.Linear(hidden, vocab)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(self.emb(x).flatten(1))))


def windows(ids, ctx, n):
    start = torch.randint(0, len(ids) - ctx - 1, (n,))
    x = torch.stack([ids[s : s + ctx] for s in start])
    return x, torch.stack([ids[s + ctx] for s in start])


def main():
    torch.manual_seed(0)
    chars = sorted(set(TEXT))
    ids = torch.tensor([chars.index(c) for c in TEXT])
    model = CharMLP(len(chars)).half()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(5):
        x, y = windows(ids, 6, 32)
        logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()  # FAULT
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
