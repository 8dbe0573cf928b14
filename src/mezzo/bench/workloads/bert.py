"""BERT of any size: fine-tuned on real texts, in a whole training, and so small that only launching its ops and deciding casts costs time."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...formats import dtype_name
from ...train import REVIEWS, TrainConfig, TrainResult, demo_config, encode, load_corpus, run, train_tokenizer
from ..roofline import Phase, adamw_phase, bytes_stored, count_flops
from ..training import Training, forward, repeated, training_session
from ..variant import Variant
from ..workload import Point, Session, Setting, Workload, check_known, check_multiple

IMPORTS = ("transformers.models.bert.modeling_bert",)
"""What a workload with a BERT loads ahead of its memory's baseline."""
HEAD_WIDTH = 64
ROWS_FOR_TOKENIZER = 4000
MODES = ("train", "eval")
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BertSize:
    """The numbers that make a BERT classifier: the width is a multiple of the heads, dropout in hidden layers and attention alike."""

    layers: int
    width: int
    heads: int
    labels: int = 2
    vocabulary: int = 21128
    dropout: float = 0.0

    def forward_phase(self, batch: int, tokens: int, bytes_per_weight: int) -> Phase:
        """Return the least work of one forward: products as torch counts them, every weight of theirs read once."""
        flops, weights = _counted(self, batch, tokens)
        return Phase(name="forward", flops=flops, moved_bytes=float(bytes_per_weight * weights))


class BertLogits(nn.Module):
    """A BERT classifier whose output is the logits alone; its weights are drawn from torch's random state."""

    def __init__(self, size: BertSize) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, intermediate_size=4 * size.width,
            hidden_dropout_prob=size.dropout, attention_probs_dropout_prob=size.dropout,
        )  # fmt: skip
        config.num_labels = size.labels
        self.bert = BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits, shape [batch, labels]. Syncs: no."""
        logits: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def random_tokens(size: BertSize, batch: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random token numbers and a mask of ones, both int64 [batch, tokens]. Syncs: no."""
    ids = torch.randint(size.vocabulary, (batch, tokens), device=device)
    return ids, torch.ones_like(ids)


@functools.cache
def _counted(size: BertSize, batch: int, tokens: int) -> tuple[float, int]:
    """Return the floating-point operations of the products in a forward, and how many weights and biases they have; nothing is computed."""
    with torch.device("meta"):
        model, inputs = BertLogits(size), random_tokens(size, batch, tokens, torch.device("meta"))
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    return count_flops(lambda: model(*inputs).sum())[0], sum(p.numel() for layer in layers for p in layer.parameters())


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of token numbers, mask and labels, shape (). Syncs: no."""
    ids, mask, labels = batch
    return nn.functional.cross_entropy(model(ids, mask).float(), labels)


@functools.cache
def _encoded_reviews(vocabulary: int, tokens: int, count: int) -> tuple[list[list[int]], list[int], int]:
    """Return token numbers and label of the first training rows, and the number of the padding token."""
    corpus = load_corpus(TrainConfig())
    tokenizer = train_tokenizer([row.text for row in corpus.train[:ROWS_FOR_TOKENIZER]], vocabulary, tokens)
    rows = corpus.train[:count]
    texts = encode(tokenizer, [row.text for row in rows], tokens)
    return texts, [corpus.labels.index(row.label) for row in rows], tokenizer.pad_token_id


def review_batches(size: BertSize, batch: int, tokens: int, count: int, device: torch.device) -> list[Batch]:
    """Return batches of the built-in reviews: token numbers and mask, padded or cut, int64 [batch, tokens], and labels, int64 [batch].

    Errors are those of `load_corpus` and `train_tokenizer`.
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
    on_cpu: ClassVar = {"batch_size": 8, "tokens": 64, "num_batches": 3, "steps": 3}
    when_quick: ClassVar = {
        "layers": 1, "width": 64, "batch_size": 2, "tokens": 8, "num_batches": 2, "steps": 2, "vocabulary": 6000,
    }  # fmt: skip
    multiples: ClassVar = {"width": HEAD_WIDTH}
    label_format: ClassVar = "{layers} x {width}, batch {batch_size} x {tokens}"

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

    variants: ClassVar = ("fp32", "tf32", "torch-amp", "mezzo-autocast", "mezzo-amp")
    variants_kept: ClassVar = ("torch-autocast", "prepare", "prepare-master")

    @property
    def size(self) -> BertSize:
        """The model's numbers."""
        return BertSize(
            layers=self.layers, width=self.width, heads=self.width // HEAD_WIDTH, vocabulary=self.vocabulary,
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
        training = Training(optimizer=self.optimizer, lr=self.lr, weight_decay=0.01, max_norm=self.max_norm)
        return training_session(variant, setting, model, batches, classification_loss, training, self.steps)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return forward, backward, norm and update of one step; the embedding counts in the last two alone."""
        width = bytes_stored(number_format)
        forward = self.size.forward_phase(self.batch_size, self.tokens, width)
        count = _counted(self.size, self.batch_size, self.tokens)[1] + self.width * (self.vocabulary + 1)
        return (
            forward,
            dataclasses.replace(
                forward, name="backward", flops=2 * forward.flops, moved_bytes=forward.moved_bytes + width * count
            ),
            Phase(name="norm", moved_bytes=float(width * count)),
            adamw_phase(number_format, float(count)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reviews(Workload):
    """A whole training of the text classifier, with its evaluations, on the built-in reviews: what precision costs in accuracy, beside time.

    Attributes:
        data: the built-in reviews, or a file that `mezzo train` reads.
        folder: where the runs lie, one folder a variant.
        epochs: passes over the training rows.
        rows: training rows at most.
    """

    unit: ClassVar[str] = "run"
    talks: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = (*IMPORTS, "tokenizers", "sklearn.metrics", "matplotlib.figure")
    tests: ClassVar[tuple[str, ...]] = ("tests/train/test_loop.py", "tests/train/test_train_step.py")

    when_quick: ClassVar = {"epochs": 1, "rows": 500}
    label_format: ClassVar = "{epochs} epochs"

    data: str = REVIEWS
    folder: str = "runs/reviews"
    epochs: int = demo_config(Path(), amp=True).epochs
    rows: int = 100_000

    variants: ClassVar[tuple[str, ...]] = ("fp32", "mezzo-amp")

    def why_not(self, variant: Variant) -> str:
        """Return why the training system does not run as a variant, or nothing if it does."""
        if variant.name in self.variants:
            return ""
        return f"the training system runs as {' or '.join(self.variants)}; name one of them"

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a training that starts when it is run; loading and testing are not timed."""
        config = demo_config(Path(self.folder) / variant.name, amp=variant.name != "fp32").replace(
            data=self.data, policy=dtype_name(setting.dtype), device=str(setting.device), seed=setting.seed, epochs=self.epochs,
            limit=self.rows,
        )  # fmt: skip
        done: list[TrainResult] = []

        def train() -> Tensor:
            done.append(run(config))
            return torch.tensor(done[-1].final_loss)

        return Session(
            warm_up=lambda: None,
            run=train,
            own_seconds=lambda: done[-1].seconds,
            measures=lambda: {"accuracy": done[-1].accuracy, "skipped steps": float(done[-1].skipped_steps)},
        )

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return nothing: evaluations and checkpoints are part of a run."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead(Workload):
    """A model so small that only launching its ops costs time.

    Attributes:
        layers: encoder layers.
        width: hidden size.
        heads: attention heads.
        batch: sequences.
        tokens: tokens in a sequence.
        steps: steps, or forwards, in a round.
        modes: train, eval, or both.
    """

    imports: ClassVar[tuple[str, ...]] = IMPORTS
    when_quick: ClassVar = {"layers": 2, "width": 16, "heads": 2, "tokens": 4, "steps": 1}

    layers: int = 12
    width: int = 64
    heads: int = 4
    batch: int = 1
    tokens: int = 8
    steps: int = 100
    modes: tuple[str, ...] = MODES

    variants: ClassVar = (
        "fp32", "torch-autocast", "torch-amp", "mezzo-autocast", "mezzo-amp", "prepare", "prepare-master",
    )  # fmt: skip

    def check(self) -> None:
        """Refuse numbers that make no BERT, and modes that do not exist."""
        Workload.check(self)
        check_known("--modes", self.modes, MODES)
        check_multiple("--width", self.width, self.heads, f"--heads {self.heads}")

    def points(self) -> tuple[Point, ...]:
        """Return training and evaluation."""
        return tuple(self.at(mode, modes=(mode,)) for mode in self.modes)

    @property
    def size(self) -> BertSize:
        """The model's numbers."""
        return BertSize(layers=self.layers, width=self.width, heads=self.heads, vocabulary=100)

    def why_not(self, variant: Variant) -> str:
        """Return why a variant does not run in this mode, or nothing if it does."""
        return Workload.why_not(self, variant) if self.modes == ("train",) else variant.why_no_inference

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded session of one mode. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        model = BertLogits(self.size).to(setting.device)
        ids, mask = random_tokens(self.size, self.batch, self.tokens, setting.device)
        labels = torch.zeros(self.batch, dtype=torch.int64, device=setting.device)
        if self.modes == ("train",):
            training = Training(optimizer=self.optimizer, lr=3e-5, weight_decay=0.01)
            batch = (ids, mask, labels)
            return training_session(variant, setting, model, [batch], classification_loss, training, self.steps)
        call = forward(variant, setting, model)
        return repeated(lambda _: nn.functional.cross_entropy(call(ids, mask).float(), labels), self.steps)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return the least work of a step: next to nothing, which is the point."""
        width = bytes_stored(number_format)
        once = self.size.forward_phase(self.batch, self.tokens, width)
        if self.modes == ("eval",):
            return (once,)
        return (once, dataclasses.replace(once, name="backward", flops=2 * once.flops))
