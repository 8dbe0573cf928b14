"""A BERT so small that its products cost nothing: what is left is the cost of launching ops, and of deciding casts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..bert import IMPORTS, BertLogits, BertSize, classification_loss, random_tokens
from ..roofline import Phase
from ..training import Training, forward, training_step
from ..variant import Variant, those_that_run
from ..workload import TRAINING_TESTS, Point, Session, Setting, Workload

WARM_UP_STEPS = 5
MODES = ("train", "eval")


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
    tests: ClassVar[tuple[str, ...]] = TRAINING_TESTS

    layers: int = 12
    width: int = 64
    heads: int = 4
    batch: int = 1
    tokens: int = 8
    steps: int = 100
    modes: tuple[str, ...] = MODES

    @classmethod
    def for_device(cls, device: torch.device) -> Overhead:
        """Return the same small model everywhere."""
        return cls()

    @classmethod
    def default_variants(cls, device: torch.device) -> tuple[str, ...]:
        """Return the regions and steps whose overhead counts."""
        names = ("fp32", "torch-autocast", "torch-amp", "mezzo-autocast", "mezzo-amp", "mezzo-prepared")
        return those_that_run(names, device)

    def check(self) -> None:
        """Refuse numbers that make no BERT, and modes that do not exist."""
        Workload.check(self)
        self.demand_known("--modes", self.modes, MODES)
        self.demand(self.width % self.heads == 0, f"--width {self.width} is not a multiple of --heads {self.heads}.")

    def points(self) -> tuple[Point, ...]:
        """Return training and evaluation."""
        return tuple(Point(label=mode, workload=dataclasses.replace(self, modes=(mode,))) for mode in self.modes)

    @property
    def size(self) -> BertSize:
        """The model's numbers."""
        return BertSize(layers=self.layers, width=self.width, heads=self.heads, vocabulary=100)

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded session of one mode. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        model = BertLogits(self.size).to(setting.device)
        ids, mask = random_tokens(self.size, self.batch, self.tokens, setting.device)
        labels = torch.zeros(self.batch, dtype=torch.int64, device=setting.device)
        if self.modes == ("eval",):
            call = forward(variant, setting, model)

            def one() -> Tensor:
                return nn.functional.cross_entropy(call(ids, mask).float(), labels)
        else:
            training = Training(optimizer="AdamW", lr=3e-5, weight_decay=0.01)
            step = training_step(variant, setting, model, classification_loss, training)

            def one() -> Tensor:
                return step((ids, mask, labels))

        def run(times: int) -> Tensor:
            for _ in range(times):
                loss = one()
            return loss

        return Session(warm_up=lambda: run(WARM_UP_STEPS), run=lambda: run(self.steps), units=self.steps)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return the least work of a step: next to nothing, which is the point."""
        width = 4 if number_format in ("fp32", "tf32") else 2
        once = self.size.forward_phase(self.batch, self.tokens, width)
        if self.modes == ("eval",):
            return (once,)
        return (once, dataclasses.replace(once, name="backward", flops=2 * once.flops))
