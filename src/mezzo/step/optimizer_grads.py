"""The gradients of an optimizer in a step, and what is done to whole lists of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import foreach_mul_, sparse_values
from ..errors import StepError
from ..kernels.dtensor import local
from ..kernels.ops.gradients import GradientCheck, norm_and_finite
from ..optim.master_weights import parameters

Skip = Literal["together", "independent"]
"""What several optimizers do when one has bad gradients: all skip, or that one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OptimizerGrads:
    """The gradients of one optimizer in a step.

    Attributes:
        optimizer: whose gradients they are.
        index: which of the prepared optimizers it is.
        params: those with gradients; at least one.
        check: of their gradients.
    """

    optimizer: Optimizer
    index: int
    params: list[Tensor]
    check: GradientCheck

    @property
    def grads(self) -> list[Tensor]:
        """The gradients. A list made anew, since a step may replace them."""
        return [p.grad for p in self.params if p.grad is not None]


def grads_of(optimizers: Mapping[int, Optimizer], inv_scale: Tensor | None) -> list[OptimizerGrads]:
    """Return the gradients of each optimizer that has any, checked. Syncs: no."""
    found = []
    for index, optimizer in optimizers.items():
        params = [p for p in parameters(optimizer) if p.grad is not None]
        if params:
            check = norm_and_finite([p.grad for p in params if p.grad is not None], inv_scale)
            found.append(OptimizerGrads(optimizer=optimizer, index=index, params=params, check=check))
    return found


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. Syncs: only from an accelerator to the host."""
    return tensor.to(device, non_blocking=device.type != "cpu")


@torch.no_grad()
def clamp_(grads: Iterable[Tensor], clip_value: float, scale: Tensor | None) -> None:
    """Clamp gradients, which may carry a scale, to a true value in both directions. Writes: `grads`. Syncs: no.

    Raises:
        StepError: a complex gradient, which has no order; nothing is written then.
    """
    distinct = list(_distinct(grads))
    if any(grad.is_complex() for grad in distinct):
        raise StepError(
            f"step(clip_value={clip_value}) would clamp complex gradients, which are neither larger nor smaller than a "
            "number. Write step(max_norm=...), which clips by their absolute values."
        )
    for grad in distinct:
        values = sparse_values(grad) if grad.is_sparse else grad
        bound = torch.full((), clip_value, device=grad.device)
        bound = bound if scale is None else bound * move(scale, grad.device)
        values.clamp_(min=-bound, max=bound)


@torch.no_grad()
def multiply_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients of any layouts and devices by one number. Writes: `grads`. Syncs: no."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in _distinct(grads):
        values = sparse_values(grad) if grad.is_sparse else grad
        kinds.setdefault((values.device, values.dtype), []).append(values)
    for (device, _), parts in kinds.items():
        foreach_mul_(parts, move(factor, device))


def _distinct(grads: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(grad): local(grad) for grad in grads}.values()
