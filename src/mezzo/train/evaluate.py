"""Rows as batches, predictions of a classifier on them, and how good they are."""

# B batch, T tokens, C classes, N rows

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dist_context import DistContext

POOL_BATCHES = 50
"""Batches that are sorted by length together: padding falls to a few percent, and the order stays random."""
MULTIPLE = 8
"""Padded lengths are multiples of this: 16-bit matrix units work on tiles of 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Padded token numbers and their mask, 1 for a token and 0 for padding, int64; and labels, int64, None where nobody knows them."""

    ids_BT: Tensor
    mask_BT: Tensor
    labels_B: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. Syncs: no."""
        labels_B = None if self.labels_B is None else _sent(self.labels_B, device)
        return Batch(ids_BT=_sent(self.ids_BT, device), mask_BT=_sent(self.mask_BT, device), labels_B=labels_B)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; from pinned memory, since a copy from any other waits."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _chunks(order: Sequence[int], size: int) -> list[list[int]]:
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def epoch_batches(lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Return the row numbers of the batches of an epoch, counted from 0: each row in exactly one, texts of like length together.

    A pure function of the arguments, `lengths` being the tokens of each row, so that a resumed run finds its place again.
    """
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pools = [sorted(pool, key=lengths.__getitem__) for pool in _chunks(order, batch_size * POOL_BATCHES)]
    batches = [batch for pool in pools for batch in _chunks(pool, batch_size)]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def micro_batches(rows: Sequence[int], count: int) -> list[list[int]]:
    """Return the rows of a batch in micro-batches that follow each other, as equal as can be; the last may be empty.

    >>> micro_batches([5, 6, 7, 8, 9], 2), micro_batches([5], 2)
    ([[5, 6, 7], [8, 9]], [[5], []])
    """
    return [part.tolist() for part in np.array_split(np.array(rows, dtype=np.int64), count)]


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches for evaluation, shortest rows first, each row in exactly one."""
    return _chunks(sorted(range(len(lengths)), key=lengths.__getitem__), batch_size)


def collate(tokens: Sequence[Sequence[int]], labels: Sequence[int] | None, *, pad_id: int, max_length: int) -> Batch:
    """Pad rows of at most `max_length` tokens to the longest, rounded up to a multiple of 8 where `max_length` allows; on the CPU."""
    longest = max(map(len, tokens))
    width = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, max_length))
    return Batch(
        ids_BT=torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in tokens]),
        mask_BT=torch.tensor([[*[1] * len(row), *[0] * (width - len(row))] for row in tokens]),
        labels_B=None if labels is None else torch.tensor(labels),
    )


def hide_tokens(batch: Batch, share: float, mask_id: int, keep: Sequence[int]) -> Batch:
    """Return a batch in which a random share of the tokens, those to keep left out, is replaced by the mask token.

    A share of 0 returns the batch itself and draws no random number.
    """
    if share == 0.0:
        return batch
    drawn = torch.rand(batch.ids_BT.shape) < share
    hidden = drawn & ~torch.isin(batch.ids_BT, torch.tensor(keep))
    return Batch(ids_BT=batch.ids_BT.masked_fill(hidden, mask_id), mask_BT=batch.mask_BT, labels_B=batch.labels_B)


def seed_dropout(device: torch.device, *numbers: int) -> None:
    """Make what dropout draws next a function of some numbers. Writes: the random state of the CPU and of the device's kind. Syncs: no."""
    seed = Random(repr(numbers)).getrandbits(63)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Rows as the model takes them: token numbers, at most `max_length`, and class of each; and the number of the padding token."""

    tokens: list[list[int]]
    labels: list[int]
    pad_id: int
    max_length: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.tokens]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return some of the rows, padded, on the CPU."""
        tokens, labels = [self.tokens[row] for row in rows], [self.labels[row] for row in rows]
        return collate(tokens, labels, pad_id=self.pad_id, max_length=self.max_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How a model does: mean cross-entropy, share of the rows whose most likely class is theirs, and that class of each row in order."""

    loss: float
    accuracy: float
    predicted: tuple[int, ...]


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return shape (B, C), fp32. Syncs: no."""
    logits_BC: Tensor = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT).logits
    return logits_BC.float()


@torch.inference_mode()
def evaluate(model: nn.Module, rows: Encoded, *, batch_size: int, world: DistContext) -> Evaluation:
    """Run a transformers classifier, prepared or not, over at least one row in evaluation mode; draws no random number.

    Each rank runs some of the batches, which are those of one rank, so each row counts once and the result is that of one
    rank, the same on all. Writes: the model's training flag, and sets it back. Syncs: yes.
    """
    was_training = model.training
    model.eval()
    logits_NC = torch.zeros(len(rows.tokens), int(model.config.num_labels))  # type: ignore[union-attr,arg-type]  # transformers' own
    for indices in by_length(rows.lengths, batch_size)[world.rank :: world.size]:
        batch = rows.batch(indices).to(world.device)
        logits_NC[torch.tensor(indices)] = logits_of(model, batch).cpu()
    logits_NC = world.sum(logits_NC)  # a row is zero on all ranks but one
    model.train(was_training)
    labels_N = torch.tensor(rows.labels)
    predicted_N = logits_NC.argmax(-1)
    return Evaluation(
        loss=float(F.cross_entropy(logits_NC, labels_N)),
        accuracy=float((predicted_N == labels_N).double().mean()),
        predicted=tuple(predicted_N.tolist()),
    )


def report(truth: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return precision, recall and F1 of each class, as data and as a table, given the class and the predicted one of each row."""
    from sklearn.metrics import classification_report

    options = {"labels": range(len(labels)), "target_names": list(labels), "zero_division": 0.0, "digits": 4}
    as_data = classification_report(truth, predicted, output_dict=True, **options)
    return as_data, classification_report(truth, predicted, **options)
