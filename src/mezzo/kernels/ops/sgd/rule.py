"""The numbers of an SGD step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...rate import rate_on


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDRule:
    """The numbers of SGD that stay the same from step to step.

    Attributes:
        weight_decay: times the weight, added to the gradient.
        momentum: decay of the running sum of gradients; 0 keeps none.
        nesterov: step along gradient plus momentum times sum, instead of the sum.
    """

    weight_decay: float
    momentum: float
    nesterov: bool = False


def sgd_scalars(
    step: Tensor, rule: SGDRule, lr: float | Tensor, dampening: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return three numbers for each parameter, computed where the step counts lie.

    Args:
        step: shape (n,), fp32: steps taken by each, this one included.
        rule: the momentum.
        lr: learning rate; a tensor has shape () or (1,) and lies on the device of `step` or on the CPU.
        dampening: taken from the weight of new gradients, from the second step on.
        dtype: of the result: that of the computation.

    Returns:
        Shape (n, 3), `dtype`, the device of `step`: -lr, the factor of the running sum, which is 0 in the first step
        and then the momentum, and the factor of the gradient, which is 1 in the first step and then 1 - dampening. Without
        momentum the last two mean nothing.

    Syncs: no.
    """
    if rule.momentum == 0 and not isinstance(lr, Tensor):
        return torch.full((*step.shape, 3), -lr, dtype=dtype, device=step.device)
    one = torch.ones_like(step, dtype=dtype)
    rate = rate_on(step.device, lr, dtype) * one if isinstance(lr, Tensor) else one * lr
    keep = torch.where(step == 1, 0 * one, one * rule.momentum)
    add = torch.where(step == 1, one, one * (1 - dampening))
    return torch.stack([-rate, keep, add], dim=-1)
