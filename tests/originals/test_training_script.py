"""The published training script on two ranks: BERT, DistributedDataParallel, a sampler, gathered evaluation, best weights, a report.

The same calls in the same order, once on torch.amp and once on mezzo; only the names that are imported differ. What the printed loop
leaves out, dropping gradients before each backward pass, stands here: without it each step adds to the gradients of the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run
from tests.originals.libraries import MEZZO, TORCH, Library
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

pytestmark = pytest.mark.distributed

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CLASSES, TOKENS, LENGTH = 6, 60, 12


LIBRARIES = {"torch": TORCH, "mezzo": MEZZO}


def _rows(count: int, seed: int) -> TensorDataset:
    """Six classes, each told by which tenth of the vocabulary most of its tokens come from."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    filler = torch.randint(TOKENS, (count, LENGTH), generator=draw)
    own = labels[:, None] * (TOKENS // CLASSES) + torch.randint(TOKENS // CLASSES, (count, LENGTH), generator=draw)
    is_own = torch.rand(count, LENGTH, generator=draw) < 0.7
    return TensorDataset(torch.where(is_own, own, filler), labels)


def _model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(123)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=LENGTH, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    plain = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(word in n for word in plain)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(word in n for word in plain)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3)


class Trainer:
    """The script's class: its steps, its reductions, its evaluations."""

    def __init__(self, world: int, model: nn.Module, library: Library, dtype: torch.dtype | None) -> None:
        self.world, self.model, self.library, self.dtype = world, model, library, dtype
        self.criterion, self.optimizer = nn.CrossEntropyLoss(), _optimizer(model)
        self.best: dict[str, Tensor] = {}

    def region(self) -> Any:
        return self.library.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def on_step(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits

    def loss_reduce(self, loss: Tensor) -> Tensor:
        total = loss.clone()
        dist.all_reduce(total)
        return total / self.world

    def gathered(self, values: Tensor) -> Tensor:
        found = [torch.zeros_like(values) for _ in range(self.world)]
        dist.all_gather(found, values)
        return torch.cat(found)

    def evaluated(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        self.model.eval()
        with torch.no_grad(), self.region():
            for ids, label in loader:
                logits = self.on_step(ids).float()
                loss = self.criterion(logits, label)
                dist.barrier()
                yield self.loss_reduce(loss), self.gathered(logits), self.gathered(label)

    def dev(self, loader: DataLoader[Any]) -> tuple[float, float]:
        found = list(self.evaluated(loader))
        correct = sum(int((logits.argmax(1) == label).sum()) for _, logits, label in found)
        return sum(float(loss) for loss, _, _ in found), correct / sum(len(label) for _, _, label in found)

    def train(self, loader: DataLoader[Any], dev: DataLoader[Any], sampler: Any, epochs: int) -> list[float]:
        scaler = self.library.GradScaler("cpu", enabled=self.dtype is torch.float16)
        losses, best, step = [], 0.0, 0
        for epoch in range(1, epochs + 1):
            sampler.set_epoch(epoch)
            for ids, label in loader:
                self.model.train()
                self.optimizer.zero_grad()
                with self.region():
                    loss = self.criterion(self.on_step(ids), label)
                dist.barrier()
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()
                losses.append(float(loss.detach()))
                step += 1
                if step % 20 == 0:
                    _, accuracy = self.dev(dev)
                    if accuracy > best:
                        best = accuracy
                        self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        return losses


def _script(rank: int, world: int, name: str, precision: str) -> tuple[list[float], float, str, dict[str, Tensor]]:
    from sklearn.metrics import classification_report

    train, dev = _rows(480, seed=1), _rows(64, seed=2)
    sampler: DistributedSampler[Any] = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    dev_loader = DataLoader(dev, batch_size=16, sampler=DistributedSampler(dev))
    trainer = Trainer(world, DistributedDataParallel(_model()), LIBRARIES[name], DTYPES[precision])
    losses = trainer.train(loader, dev_loader, sampler, epochs=3)
    trainer.model.load_state_dict(trainer.best)
    found = list(trainer.evaluated(dev_loader))
    truth, predicted = (torch.cat(parts).tolist() for parts in ([f[2] for f in found], [f[1].argmax(1) for f in found]))
    report = classification_report(truth, predicted, labels=range(CLASSES), zero_division=0.0)
    accuracy = sum(a == b for a, b in zip(truth, predicted, strict=True)) / len(truth)
    return losses, accuracy, report, trainer.best


@pytest.mark.parametrize("precision", [pytest.param(p, marks=() if p == "fp16" else pytest.mark.slow) for p in DTYPES])
def test_the_script_learns_on_both_libraries_and_gives_the_same(precision: str) -> None:
    wanted, found = (run(2, _script, name, precision) for name in ("torch", "mezzo"))
    for rank in range(2):
        assert found[rank][:3] == wanted[rank][:3]
        assert all(torch.equal(found[rank][3][name], value) for name, value in wanted[rank][3].items())
    (first, accuracy, report, _), (_, same, other, _) = found
    assert (accuracy, report) == (same, other)  # gathered: both ranks know all rows
    assert accuracy > 0.8 and first[-1] < first[0] / 2
