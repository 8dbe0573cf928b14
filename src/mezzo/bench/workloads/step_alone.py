"""The optimizer step alone: unscale, clip, AdamW, over gradients that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...formats import memory_bytes
from ..roofline import Phase, adamw_phase, bytes_stored
from ..training import Training, mean_square, repeated, training_step
from ..variant import Variant
from ..workload import Point, Session, Setting, Workload

MATRIX = 1024
BYTES = 20
"""Of a parameter: fp32 weight, gradient and moments, and what a step makes beside them."""
FEW_STEPS = 5 * 10**8
"""Parameters stepped in a round: a step of a billion takes seconds, and a mean of two of them says as much as of twenty small ones."""
# At scale 1 and a norm below this one, unscaling and clipping multiply every gradient by exactly 1: all their work is
# done, and the same gradients serve every step.
NEVER_CLIPPED = 1e6


class _Given(torch.autograd.Function):
    """A loss whose gradients are given: its backward hands out tensors over their memory and computes nothing."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(gradient.detach() for gradient in ctx.gradients))


class GivenGradients(nn.Module):
    """Square linear layers, and one for what is left, whose gradients are drawn once and never change; of `count` weights in all."""

    def __init__(self, count: int) -> None:
        super().__init__()
        square = MATRIX * MATRIX
        shapes = [(MATRIX, MATRIX)] * (count // square)
        if count % square:
            shapes.append((count % square, 1))
        drawn = torch.randn(square) * MATRIX**-0.5  # once, for every layer: a billion would take longer than a round
        self.layers = nn.ModuleList(nn.Linear(wide, out, bias=False, device="meta") for wide, out in shapes)
        with torch.no_grad():
            for weight in self.layers.to_empty(device="cpu").parameters():
                weight.copy_(drawn[: weight.numel()].view_as(weight))
        self._gradients: list[Tensor] = []

    def forward(self) -> Tensor:
        """Return a loss of 0 with its gradients, in the dtype the weights are stored in; shape (), fp32. Syncs: no."""
        weights = list(self.parameters())
        if not self._gradients:
            # drawn once too: what is freed between two that stay leaves a hole of its size in the C library's heap
            drawn = {w.shape: (w.detach().flip(0) * 1e-2).to(w.dtype) for w in weights[:1] + weights[-1:]}
            self._gradients = [drawn[w.shape].clone() for w in weights]
        loss: Tensor = _Given.apply(self._gradients, *weights)  # type: ignore[no-untyped-call]  # torch's own
        return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Workload):
    """Unscaling, clipping and AdamW alone, by number of parameters.

    Attributes:
        parameters: numbers of parameters, one point each.
        steps: steps in a round, at most; fewer where there are many parameters.
    """

    tests: ClassVar[tuple[str, ...]] = (
        "tests/loss_scale/test_scaler.py", "tests/loss_scale/test_unscale.py", "tests/kernels/test_cpu_kernels.py",
        "tests/kernels/test_gradients.py", "tests/optim/test_trajectory.py", "tests/step/test_stepper.py",
    )  # fmt: skip

    on_cpu: ClassVar = {"parameters": (10**7, 10**8)}
    when_quick: ClassVar = {"parameters": (1000, 2 * MATRIX * MATRIX + 5), "steps": 2}

    parameters: tuple[int, ...] = (10**7, 10**8, 10**9)
    steps: int = 20

    variants: ClassVar = ("fp32", "torch-autocast", "torch-amp", "mezzo-amp", "prepare", "prepare-master")

    def points(self) -> tuple[Point, ...]:
        """Return one point for each number of parameters."""
        steps = {n: min(self.steps, max(2, FEW_STEPS // n)) for n in self.parameters}
        return tuple(
            self.at(f"{n:.0e} parameters", "parameters", n, parameters=(n,), steps=steps[n]) for n in self.parameters
        )

    def is_resident(self, device: torch.device) -> bool:
        """Whether all default variants fit into half of the host's memory: what is built anew is warmed up anew. Host only."""
        memory = memory_bytes() if device.type == "cpu" else 0
        return 2 * len(self.default_variants(device)) * BYTES * self.parameters[0] <= memory

    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return seeded weights with gradients, and their step. Writes: torch's random state."""
        torch.manual_seed(setting.seed)
        model = GivenGradients(self.parameters[0]).to(setting.device)
        training = Training(
            optimizer=self.optimizer, lr=1e-4, weight_decay=0.01, max_norm=NEVER_CLIPPED, init_scale=1.0
        )
        step = training_step(variant, setting, model, lambda given, _: given(), training)
        return repeated(step, self.steps, loss=lambda _: mean_square(next(model.parameters()).detach()[:1]))

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return one pass for the norm and one for the update; nothing smaller knows the norm before it clips."""
        count = float(self.parameters[0])
        norm = Phase(name="norm", moved_bytes=bytes_stored(number_format) * count)
        return norm, adamw_phase(number_format, count)
