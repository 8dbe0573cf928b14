"""Programs on sequences: a small GPT, recurrent cells, translation with attention, a transformer with padding."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from tests.loops.swap import Prepare, adam, program, trained
from torch import Tensor, nn


class Gpt(nn.Module):
    def __init__(self, words: int = 32, width: int = 32, time: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(time, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_1, self.norm_2, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, words, bias=False)
        self.tokens.weight = self.head.weight
        self.register_buffer("tril", torch.tril(torch.ones(time, time)).view(1, 1, time, time))
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        batch, time = tokens.shape
        x = self.tokens(tokens) + self.positions(torch.arange(time))
        q, k, v = (t.view(batch, time, 4, 8).transpose(1, 2) for t in self.qkv(self.norm_1(x)).split(32, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(8)
        scores = scores.masked_fill(self.tril[:, :, :time, :time] == 0, float("-inf"))
        mixed = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(batch, time, 32)
        x = x + self.out(mixed)
        logits = self.head(self.norm(x + self.mlp(self.norm_2(x))))
        return logits, None if targets is None else F.cross_entropy(logits.view(-1, 32), targets.view(-1))


@program
def small_gpt(prepare: Prepare, steps: int) -> list[float]:
    """Groups with and without decay, a rate set by hand, two micro-batches, tied weights, then sampling."""
    model = Gpt()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    amp = prepare(model, optimizer)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 3)
        for _ in range(2):
            tokens = (torch.randint(0, 32, (4, 1)) + torch.arange(17)) % 32
            loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())[1]
            amp.backward(loss / 2)
        amp.step(max_norm=1.0)
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        tokens = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(4):
            logits = model(tokens)[0][:, -1]
            logits[logits < torch.topk(logits, 5).values[:, [-1]]] = -float("inf")
            tokens = torch.cat([tokens, torch.multinomial(F.softmax(logits, dim=-1), 1)], dim=1)
    return losses


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.cell, self.out = nn.Embedding(30, 16), nn.LSTMCell(16, 16), nn.Linear(16, 30)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found = []
        for t in range(x.size(1)):
            state = self.cell(self.letters(x[:, t]), state)
            found.append(self.out(state[0]))
        return torch.stack(found, dim=1), state


@program
def letters(prepare: Prepare, steps: int) -> list[float]:
    """A state in fp32 at first, carried from step to step, cut by detach."""
    model = Letters()
    optimizer = adam(model, lr=1e-2)
    amp = prepare(model, optimizer)
    state = (torch.zeros(4, 16), torch.zeros(4, 16))
    losses = []
    for _ in range(steps):
        x = (torch.randint(0, 30, (4, 1)) + torch.arange(9)) % 30
        state = (state[0].detach(), state[1].detach())
        optimizer.zero_grad()
        logits, state = model(x[:, :-1], state)
        loss = F.cross_entropy(logits.transpose(1, 2), x[:, 1:])
        amp.backward(loss)
        amp.step(max_norm=1.0)
        losses.append(loss.item())
    return losses


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(32, 2)
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(4, x.size(0), 16), torch.zeros(4, x.size(0), 16)
        return self.out(self.lstm(self.words(x), state)[0][:, -1])


@program
def lstm(prepare: Prepare, steps: int) -> list[float]:
    """Both directions, two layers, states of fp32 zeros."""
    model = Tagger()
    x, y = torch.randint(1, 20, (16, 7)), torch.arange(16) % 2
    return trained(
        prepare, model, adam(model, lr=1e-2), steps, lambda: nn.CrossEntropyLoss()(model(x), y), max_norm=5.0
    )


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder, self.decoder = nn.Embedding(20, 16), nn.GRU(16, 16), nn.GRU(16, 16)
        self.attention, self.out = nn.Linear(32, 1), nn.Linear(32, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        found = torch.zeros(*target.shape, 20)
        seen, state = self.encoder(self.words(source))
        word = target[0]
        for t in range(1, len(target)):
            now, state = self.decoder(self.words(word).unsqueeze(0), state)
            weight = self.attention(torch.cat([now.expand_as(seen), seen], 2)).softmax(0)
            context = torch.bmm(weight.permute(1, 2, 0), seen.transpose(0, 1)).squeeze(1)
            found[t] = self.out(torch.cat([now.squeeze(0), context], 1))
            word = target[t] if random.random() < 0.5 else found[t].argmax(1)
        return found


@program
def translation(prepare: Prepare, steps: int) -> list[float]:
    """Outputs written into a tensor of zeros, and a teacher that is not always listened to."""
    random.seed(0)
    model = Translator()

    def loss_fn() -> Tensor:
        source, target = torch.randint(0, 20, (6, 4)), torch.randint(0, 20, (5, 4))
        return F.cross_entropy(model(source, target)[1:].reshape(-1, 20), target[1:].reshape(-1), ignore_index=0)

    return trained(prepare, model, adam(model), steps, loss_fn, max_norm=1.0)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        angle = torch.arange(10).unsqueeze(1) * torch.exp(torch.arange(0, 16, 2) * (-math.log(1e4) / 16))
        self.register_buffer("waves", torch.cat([angle.sin(), angle.cos()], 1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = self.body.generate_square_subsequent_mask(target.size(1))
        a, b = (self.words(t) * 4 + self.waves[: t.size(1)] for t in (source, target))
        return self.out(self.body(a, b, tgt_mask=causal, src_key_padding_mask=source == 0))


@program
def transformer(prepare: Prepare, steps: int) -> list[float]:
    """Padding, a causal mask, a rate by lambda, and evaluation, where torch has a fused kernel."""
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    amp = prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        source, target = torch.randint(1, 20, (4, 6)), torch.randint(1, 20, (4, 5))
        source[:, 5] = 0
        optimizer.zero_grad()
        found = model(source, target[:, :-1])
        loss = nn.CrossEntropyLoss(ignore_index=0)(found.reshape(-1, 20), target[:, 1:].reshape(-1))
        amp.backward(loss)
        amp.step()
        scheduler.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        again = model(source, target[:, :-1])
    return [*losses, nn.CrossEntropyLoss(ignore_index=0)(again.reshape(-1, 20), target[:, 1:].reshape(-1)).item()]
