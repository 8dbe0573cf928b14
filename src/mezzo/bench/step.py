"""The optimizer step alone: unscale, clip, AdamW, over gradients that stay as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..scaling import GradScaler
from .floor import Phase
from .training import scaler_of
from .variant import Variant, those_that_run
from .workload import Point, Session, Setting, Workload

WARM_UP_STEPS = 2
MATRIX = 1024
# At scale 1 and a norm below this one, unscaling and clipping multiply every gradient by exactly 1: all their work is
# done, and the same gradients serve every step.
NEVER_CLIPPED = 1e6


def make_parameters(count: int, device: torch.device) -> nn.ParameterList:
    """Return fp32 parameters of `count` elements in all: square matrices, and one vector for what is left."""
    square = MATRIX * MATRIX
    shapes: list[tuple[int, ...]] = [(MATRIX, MATRIX)] * (count // square)
    shapes += [(count % square,)] if count % square else []
    return nn.ParameterList(nn.Parameter(torch.randn(shape, device=device).mul_(0.02)) for shape in shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Workload):
    """Unscaling, clipping and AdamW alone, by number of parameters.

    Attributes:
        parameters: numbers of parameters, one point each.
        steps: steps in a round.
    """

    resident: ClassVar[bool] = False
    tests: ClassVar[tuple[str, ...]] = ("tests/optim", "tests/kernels")

    parameters: tuple[int, ...] = (10**7, 10**8, 10**9)
    steps: int = 20

    @classmethod
    def for_device(cls, device: torch.device) -> Step:
        """Return up to a billion parameters on CUDA, a hundred million and fewer steps on the CPU."""
        return cls() if device.type == "cuda" else cls(parameters=(10**7, 10**8), steps=5)

    @classmethod
    def default_variants(cls, device: torch.device) -> tuple[str, ...]:
        """Return the step without scaling, and with either GradScaler."""
        return those_that_run(("fp32", "torch-amp", "mezzo-amp"), device)

    def points(self) -> tuple[Point, ...]:
        """Return one point for each number of parameters."""
        return tuple(
            Point(
                label=f"{n:.0e} parameters",
                workload=dataclasses.replace(self, parameters=(n,)),
                axis="parameters",
                value=n,
            )
            for n in self.parameters
        )

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return seeded parameters with gradients, and their step. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        weights = make_parameters(self.parameters[0], setting.device)
        gradients = [torch.randn_like(weight).mul_(1e-3) for weight in weights]
        one = self._step(variant, setting, weights)

        def run(times: int) -> Tensor:
            for _ in range(times):
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.grad = gradient.detach()  # a new tensor over the same memory, as if from a new backward
                one()
            first: Tensor = weights[0].detach()[:1].float()
            return first.square().mean()

        return Session(warm_up=lambda: run(WARM_UP_STEPS), run=lambda: run(self.steps), units=self.steps)

    def _step(self, variant: Variant, setting: Setting, weights: nn.ParameterList) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        scaler = scaler_of(variant, setting, init_scale=1.0)

        def plain() -> None:
            nn.utils.clip_grad_norm_(weights, NEVER_CLIPPED)
            optimizer.step()

        def scaled() -> None:
            assert scaler is not None
            if isinstance(scaler, GradScaler):
                scaler.mark_scaled(optimizer)  # no backward pass of a scaled loss left these gradients
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights, NEVER_CLIPPED)
            scaler.step(optimizer)
            scaler.update()

        if scaler is None:
            return plain
        scaler.scale(torch.zeros((), device=setting.device))  # the first call puts the scale on the device
        return scaled

    def floor(self, number_format: str) -> tuple[Phase, ...]:
        """Return one pass for the norm and one for the update; nothing smaller knows the norm before it clips.

        fp32: the update reads gradient, weight and two moments and writes the last three, 28 bytes a parameter.
        16 bit: a gradient of 2 bytes, and a master of 4 that is weight and remainder, 26 bytes.
        """
        gradient = 4 if number_format in ("fp32", "tf32") else 2
        count = float(self.parameters[0])
        return (
            Phase(name="norm", moved_bytes=gradient * count),
            Phase(name="update", moved_bytes=(gradient + 24) * count),
        )
