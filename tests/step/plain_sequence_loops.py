"""Loops over sequences as people write them: a language model, recurrent nets, BERT; see `plain_loops`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.loops.swap import Prepare, trained
from tests.step.plain_loops import adamw, loop
from torch import Tensor, nn
from torch.nn import functional as F


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 20, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


@loop
def language_model(prepare: Prepare, steps: int) -> list[float]:
    model = Decoder()
    tokens = (torch.arange(8)[:, None] + torch.arange(13)) % 20

    def loss_fn() -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.reshape(-1, 20), tokens[:, 1:].reshape(-1))

    return trained(prepare, model, adamw(model), steps, loss_fn)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = cell(3, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.rnn(x, state)
        return self.head(out), state


def _recurrent(cell: type[nn.RNNBase], prepare: Prepare, steps: int) -> list[float]:
    model = Recurrent(cell)
    x = torch.randn(8, 10, 3)
    y = x.cumsum(1).tanh()[..., :1]

    def loss_fn() -> Tensor:
        first, state = model(x[:, :5])
        second, _ = model(x[:, 5:], state)
        return F.smooth_l1_loss(torch.cat([first, second], 1), y)

    return trained(prepare, model, adamw(model), steps, loss_fn)


@loop
def lstm(prepare: Prepare, steps: int) -> list[float]:
    return _recurrent(nn.LSTM, prepare, steps)


@loop
def gru(prepare: Prepare, steps: int) -> list[float]:
    return _recurrent(nn.GRU, prepare, steps)


@loop
def bert(prepare: Prepare, steps: int) -> list[float]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    tokens, mask, labels = torch.randint(0, 50, (12, 9)), torch.ones(12, 9, dtype=torch.long), torch.arange(12) % 3

    def loss_fn() -> Tensor:
        return F.cross_entropy(model(input_ids=tokens, attention_mask=mask).logits, labels)

    return trained(prepare, model, adamw(model), steps, loss_fn)
