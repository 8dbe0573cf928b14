"""The numbers of an AdamW step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ....formats import widest
from ...rate import rate_on


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWRule:
    """The numbers of AdamW that stay the same from step to step.

    Attributes:
        beta1: decay of the mean of gradients; in [0, 1).
        beta2: decay of the mean of squares; in [0, 1).
        eps: added to the root of the mean of squares.
        amsgrad: divide by the largest mean of squares so far.
        l2: weight decay added to the gradient, as torch.optim.Adam does; 0 for AdamW.
    """

    beta1: float
    beta2: float
    eps: float
    amsgrad: bool = False
    l2: float = 0.0


def adamw_scalars(
    step: Tensor, rule: AdamWRule, lr: float | Tensor, weight_decay: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return three numbers for each parameter, computed where the step counts lie.

    Args:
        step: shape (n,), fp32: steps taken by each, this one included.
        rule: the betas.
        lr: learning rate; a tensor has shape () or (1,) and lies on the device of `step` or on the CPU.
        weight_decay: decoupled decay.
        dtype: of the result: that of the computation.

    Returns:
        Shape (n, 3), `dtype`, the device of `step`: the factor 1 - lr * weight_decay of the weight, the negative step
        size -lr / (1 - beta1^t), and sqrt(1 - beta2^t). Computed in fp64 where the device has it.

    Syncs: no.
    """
    count = step.to(widest(step.device))
    # beta^t - 1, the corrections with their signs changed
    over1 = torch.expm1(count * math.log(rule.beta1)) if rule.beta1 > 0 else -torch.ones_like(count)
    over2 = torch.expm1(count * math.log(rule.beta2)) if rule.beta2 > 0 else -torch.ones_like(count)
    if isinstance(lr, Tensor):
        rate = rate_on(step.device, lr, dtype)
        decay, size = (1 - rate * weight_decay).expand_as(step), rate / over1.to(dtype)
    else:
        decay = torch.full_like(step, 1 - lr * weight_decay, dtype=dtype)
        size = torch.full_like(count, lr) / over1
    return torch.stack([decay, size.to(dtype), (-over2).sqrt().to(dtype)], dim=-1)
