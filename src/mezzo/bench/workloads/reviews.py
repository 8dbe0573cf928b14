"""A whole training of the text classifier with its evaluations: what precision costs in accuracy, beside time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ...formats import dtype_name
from ...train import REVIEWS, TrainResult, demo_config, run
from ..roofline import Phase
from ..variant import Variant
from ..workload import Session, Setting, Workload
from .bert import IMPORTS

VARIANTS = ("fp32", "mezzo-amp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reviews(Workload):
    """A whole training of the text classifier on the built-in reviews.

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

    data: str = REVIEWS
    folder: str = "runs/reviews"
    epochs: int = demo_config(Path(), amp=True).epochs
    rows: int = 100_000

    variants: ClassVar[tuple[str, ...]] = VARIANTS

    @property
    def label(self) -> str:
        """Epochs."""
        return f"{self.epochs} epochs"

    def why_not(self, variant: Variant) -> str:
        """Return why the training system does not run as a variant, or nothing if it does."""
        return (
            "" if variant.name in VARIANTS else f"the training system runs as {' or '.join(VARIANTS)}; name one of them"
        )

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
