"""A small GPT with bf16 weights and exact masters: micro-batches, clipping, saving, and going on bit for bit."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo

VOCABULARY, CONTEXT, WIDTH = 64, 32, 64


class Block(nn.Module):
    """Attention, then a multilayer perceptron, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (batch, time, width), in and out."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, shape (batch, time, vocabulary)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count up in steps of their own, so that the next token can be known."""
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(1, 8, (16, 1), generator=generator) for _ in range(2))
    rows = (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    return rows[:, :-1], rows[:, 1:]


def start() -> mezzo.Stepper:
    """A fresh model, ready to train."""
    torch.manual_seed(0)
    model = GPT()
    return mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "bf16-master")


def train(amp: mezzo.Stepper, steps: range) -> float:
    """Take steps of two micro-batches each; return the last loss."""
    for step in steps:
        amp.zero_grad()
        for part in range(2):
            x, y = batch(2 * step + part)
            loss = F.cross_entropy(amp.model(x).flatten(0, 1), y.flatten())
            amp.backward(loss / 2)
        amp.step(max_norm=1.0)
    return loss.item()


amp = start()
first = train(amp, range(1))
with tempfile.TemporaryDirectory() as folder:
    train(amp, range(1, 12))
    torch.save(amp.state_dict(), Path(folder) / "run.pt")
    last = train(amp, range(12, 24))

    again = start()
    again.load_state_dict(torch.load(Path(folder) / "run.pt"))
    train(again, range(12, 24))

print(amp.report())
same = all(torch.equal(a, b) for a, b in zip(amp.model.parameters(), again.model.parameters(), strict=True))
print(
    f"loss {first:.2f} -> {last:.2f}; after going on from the middle the weights are {'equal' if same else 'not equal'}"
)
assert last < first / 2 and same
