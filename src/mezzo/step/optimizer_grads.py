"""The gradients of each optimizer in a step, and their check."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..kernels import GradientCheck, norm_and_finite
from ..loss_scale import Flag, host_decides, is_bad
from ..read_only import read_only


@read_only
class OptimizerGrads:
    """The gradients of one optimizer in a step, by its index among the prepared ones, the parameters that have some, at least one, and their check."""

    optimizer: Optimizer
    index: int
    params: list[Tensor]
    check: GradientCheck

    def is_bad(self, device: torch.device) -> Flag:
        """Return whether their norm is inf or NaN; see `is_bad`."""
        known = self.check.known
        return is_bad(self.check.norm, device) if known is None or not host_decides(device) else not known.is_finite()

    @property
    def grads(self) -> list[Tensor]:
        """The gradients. A list made anew, since a step may replace them. Host only."""
        return [p.grad for p in self.params if p.grad is not None]


def grads_of(optimizers: Mapping[int, Optimizer], inv_scale: Tensor | None) -> list[OptimizerGrads]:
    """Return the gradients of each optimizer that has any, checked. Syncs: no."""
    found = []
    for index, optimizer in optimizers.items():
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if params:
            check = norm_and_finite([p.grad for p in params], inv_scale)
            found.append(OptimizerGrads(optimizer=optimizer, index=index, params=params, check=check))
    return found
