"""How the cost of a training step grows: one axis at a time, everything else at its middle size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..roofline import Phase
from ..variant import Variant, those_that_run
from ..workload import TRAINING_TESTS, Point, Session, Setting, Workload
from .recipe import Recipe

SMALL_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling(Workload):
    """How the cost of a step grows with width, batch, depth and parameters.

    Attributes:
        width: features where another axis varies.
        batch: rows where another axis varies.
        depth: layers where another axis varies.
        widths: features along the axis of width.
        batches: rows along the axis of batch.
        depths: layers along the axis of depth.
        parameter_widths: features along the axis of parameters, at 8 rows, where weights are all that costs.
        steps: steps in a round.
    """

    tests: ClassVar[tuple[str, ...]] = TRAINING_TESTS

    width: int = 2048
    batch: int = 512
    depth: int = 4
    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    batches: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    parameter_widths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    steps: int = 20

    @classmethod
    def for_device(cls, device: torch.device) -> Scaling:
        """Return axes that end in a large model on CUDA, and in some seconds a round on the CPU."""
        if device.type == "cuda":
            return cls()
        return cls(
            width=512, batch=128, depth=3, widths=(128, 256, 512, 1024), batches=(16, 64, 256), depths=(2, 4, 8),
            parameter_widths=(256, 512, 1024, 2048),
        )  # fmt: skip

    @classmethod
    def default_variants(cls, device: torch.device) -> tuple[str, ...]:
        """Return default precision, torch.amp, mezzo's drop-in and prepared."""
        return those_that_run(("fp32", "tf32", "torch-amp", "mezzo-amp", "mezzo-prepared"), device)

    def _at(self, width: int, batch: int, depth: int) -> Scaling:
        return dataclasses.replace(self, width=width, batch=batch, depth=depth)

    def points(self) -> tuple[Point, ...]:
        """Return every size of every axis."""
        found = [("width", n, self._at(n, self.batch, self.depth)) for n in self.widths]
        found += [("batch", n, self._at(self.width, n, self.depth)) for n in self.batches]
        found += [("depth", n, self._at(self.width, self.batch, n)) for n in self.depths]
        small = [self._at(n, SMALL_BATCH, self.depth) for n in self.parameter_widths]
        found += [("parameters", one.recipe.parameters, one) for one in small]
        return tuple(Point(label=f"{axis} {n}", workload=one, axis=axis, value=n) for axis, n, one in found)

    @property
    def recipe(self) -> Recipe:
        """The recipe at this size, one batch repeated."""
        return Recipe(
            batch_size=self.batch, in_size=self.width, out_size=self.width, num_layers=self.depth, num_batches=1,
            epochs=self.steps,
        )  # fmt: skip

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return a seeded training at this size. Writes: torch's random state."""
        return self.recipe.build(variant, setting)

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return the least work of one step of the recipe at this size."""
        return self.recipe.roofline(number_format)
