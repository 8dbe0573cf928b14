"""Fine-tuning steps of a BERT classifier on real texts: the built-in reviews, tokenized, in batches of one length."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..bert import IMPORTS, BertLogits, BertSize, classification_loss
from ..roofline import Phase
from ..training import Training, training_step
from ..variant import Variant, those_that_run
from ..workload import TRAINING_TESTS, Point, Session, Setting, Workload

WARM_UP_STEPS = 3
BERT_HEAD = 64
ROWS_FOR_TOKENIZER = 4000
Batch = tuple[Tensor, Tensor, Tensor]


@functools.cache
def _encoded_reviews(vocabulary: int, tokens: int, count: int) -> tuple[list[list[int]], list[int], int]:
    """Return token numbers and label of the first training rows, and the number of the padding token."""
    from ...train import TrainConfig, encode, load_corpus, train_tokenizer

    corpus = load_corpus(TrainConfig())
    tokenizer = train_tokenizer([row.text for row in corpus.train[:ROWS_FOR_TOKENIZER]], vocabulary, tokens)
    rows = corpus.train[:count]
    texts = encode(tokenizer, [row.text for row in rows], tokens)
    return texts, [corpus.labels.index(row.label) for row in rows], tokenizer.pad_token_id


def review_batches(size: BertSize, batch: int, tokens: int, count: int, device: torch.device) -> list[Batch]:
    """Return batches of the built-in reviews, each padded or cut to `tokens`.

    Returns:
        Token numbers and mask, int64 [batch, tokens], and labels, int64 [batch].

    Raises:
        ConfigError: the transformers library or the data is not installed.
    """
    texts, labels, pad = _encoded_reviews(size.vocabulary, tokens, batch * count)
    ids_BT = torch.tensor([(text + [pad] * tokens)[:tokens] for text in texts], device=device)
    labels_B = torch.tensor(labels, device=device)
    return [
        (ids_BT[at : at + batch], (ids_BT[at : at + batch] != pad).long(), labels_B[at : at + batch])
        for at in range(0, batch * count, batch)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text(Workload):
    """Fine-tuning steps of a BERT classifier on real texts.

    Attributes:
        layers: encoder layers.
        width: hidden size, a multiple of 64.
        batch_size: texts in a batch.
        tokens: tokens of every text, padded or cut.
        num_batches: different batches, taken in turn.
        steps: steps in a round.
        vocabulary: entries of the tokenizer.
        dropout: in the hidden layers.
        lr: learning rate of AdamW.
        max_norm: gradients are clipped to this norm.
    """

    imports: ClassVar[tuple[str, ...]] = IMPORTS
    tests: ClassVar[tuple[str, ...]] = TRAINING_TESTS

    layers: int = 12
    width: int = 768
    batch_size: int = 32
    tokens: int = 128
    num_batches: int = 20
    steps: int = 40
    vocabulary: int = 8000
    dropout: float = 0.1
    lr: float = 3e-5
    max_norm: float = 1.0

    @classmethod
    def for_device(cls, device: torch.device) -> Text:
        """Return BERT-base; on the CPU with smaller batches and fewer steps."""
        return cls() if device.type == "cuda" else cls(batch_size=8, tokens=64, num_batches=3, steps=3)

    @classmethod
    def default_variants(cls, device: torch.device) -> tuple[str, ...]:
        """Return default precision, region alone, region with scaler, torch's and mezzo's, and prepared."""
        names = ("fp32", "tf32", "torch-autocast", "torch-amp", "mezzo-autocast", "mezzo-amp", "mezzo-prepared")
        return those_that_run(names, device)

    def check(self) -> None:
        """Refuse widths that do not divide into heads."""
        Workload.check(self)
        self.demand(
            self.width % BERT_HEAD == 0, f"--width {self.width} is not a multiple of {BERT_HEAD}, the width of a head."
        )

    def points(self) -> tuple[Point, ...]:
        """Return the one size of this workload."""
        label = f"{self.layers} x {self.width}, batch {self.batch_size} x {self.tokens}"
        return (Point(label=label, workload=self),)

    @property
    def size(self) -> BertSize:
        """The model's numbers."""
        return BertSize(
            layers=self.layers, width=self.width, heads=self.width // BERT_HEAD, vocabulary=self.vocabulary,
            dropout=self.dropout,
        )  # fmt: skip

    def load(self) -> None:
        """Read and tokenize the reviews."""
        _encoded_reviews(self.vocabulary, self.tokens, self.batch_size * self.num_batches)

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded fine-tuning of one variant. Writes: torch's random state."""
        batches = review_batches(self.size, self.batch_size, self.tokens, self.num_batches, setting.device)
        torch.manual_seed(setting.seed)
        model: nn.Module = BertLogits(self.size).to(setting.device)
        training = Training(optimizer="AdamW", lr=self.lr, weight_decay=0.01, max_norm=self.max_norm)
        step = training_step(variant, setting, model, classification_loss, training)

        def run(times: int) -> Tensor:
            for number in range(times):
                loss = step(batches[number % len(batches)])
            return loss

        return Session(
            warm_up=lambda: run(WARM_UP_STEPS),
            run=lambda: run(self.steps),
            units=self.steps,
            data_bytes=sum(part.nbytes for batch in batches for part in batch),
        )

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return forward, backward, norm and update of one step; the embedding counts in the last two alone.

        16 bit: gradients of 2 bytes, masters of 4 that are weight and remainder. fp32: 4 bytes each. Two moments of 4.
        """
        width = 4 if number_format in ("fp32", "tf32") else 2
        forward = self.size.forward_phase(self.batch_size, self.tokens, width)
        count = self.size.product_weights + self.size.width * (self.vocabulary + 1)
        return (
            forward,
            dataclasses.replace(
                forward, name="backward", flops=2 * forward.flops, moved_bytes=forward.moved_bytes + width * count
            ),
            Phase(name="norm", moved_bytes=float(width * count)),
            Phase(name="update", moved_bytes=float((width + 24) * count)),
        )
