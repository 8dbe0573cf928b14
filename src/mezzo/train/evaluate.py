"""Predictions of a classifier, and how good they are."""

# B batch, T tokens, C classes, N rows

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import Batch, by_length, collate
from .dist_context import DistContext, alone


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
def evaluate(
    model: nn.Module, rows: Encoded, *, batch_size: int, device: torch.device, world: DistContext | None = None
) -> Evaluation:
    """Run a transformers classifier, prepared or not, over at least one row in evaluation mode; draws no random number.

    Each rank runs some of the batches, which are those of one rank, so each row counts once and the result is that of one
    rank, the same on all. Without `world` this rank does it all.

    Writes: the model's training flag, and sets it back. Syncs: yes.
    """
    was_training = model.training
    model.eval()
    world = alone(device) if world is None else world
    logits_NC = torch.zeros(len(rows.tokens), int(model.config.num_labels))  # type: ignore[union-attr,arg-type]  # transformers' own
    for indices in by_length(rows.lengths, batch_size)[world.rank :: world.size]:
        batch = rows.batch(indices).to(device)
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
