"""What an AdamW step works with besides weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWRule:
    """The numbers of AdamW that stay the same from step to step.

    Attributes:
        beta1: decay of the mean of gradients; in [0, 1).
        beta2: decay of the mean of squares; in [0, 1).
        eps: added to the root of the mean of squares.
        amsgrad: divide by the largest mean of squares so far.
    """

    beta1: float
    beta2: float
    eps: float
    amsgrad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moments:
    """Running means of each parameter, all of one dtype: fp32 or bf16, fp64 for fp64 weights.

    Attributes:
        means: of gradients, in the shapes of the weights.
        squares: of squared gradients.
        peaks: the largest of those so far; empty without amsgrad.
        seeds: of the random bits that round bf16 means; in [0, 2**32).
    """

    means: Sequence[Tensor]
    squares: Sequence[Tensor]
    peaks: Sequence[Tensor]
    seeds: Sequence[int]

    @property
    def lists(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Means, squares and peaks, as a kernel takes them."""
        return self.means, self.squares, self.peaks

    def at(self, indices: Sequence[int]) -> Moments:
        """Return the means at some places."""
        return Moments(
            means=[self.means[i] for i in indices],
            squares=[self.squares[i] for i in indices],
            peaks=[self.peaks[i] for i in indices if self.peaks],
            seeds=[self.seeds[i] for i in indices],
        )


def adamw_scalars(
    step: Tensor, rule: AdamWRule, lr: float | Tensor, weight_decay: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the three numbers of one step, computed where the step count lies.

    Args:
        step: shape (), fp32: steps taken, this one included.
        rule: the betas.
        lr: learning rate; a tensor has shape () or (1,) and lies on the device of `step` or on the CPU.
        weight_decay: decoupled decay.
        dtype: of the result: that of the computation.

    Returns:
        Shape (3,), `dtype`, the device of `step`: the factor 1 - lr * weight_decay of the weight, the negative step
        size -lr / (1 - beta1^t), and sqrt(1 - beta2^t). Computed in fp64 where the device has it.

    Syncs: no.
    """
    wide = torch.float32 if step.device.type == "mps" else torch.float64
    count = step.to(wide)
    # beta^t - 1, the corrections with their signs changed
    over1 = torch.expm1(count * math.log(rule.beta1)) if rule.beta1 > 0 else -torch.ones_like(count)
    over2 = torch.expm1(count * math.log(rule.beta2)) if rule.beta2 > 0 else -torch.ones_like(count)
    if isinstance(lr, Tensor):
        rate = lr.detach().reshape(()).to(step.device, dtype)
        decay, size = 1 - rate * weight_decay, rate / over1.to(dtype)
    else:
        decay = torch.full((), 1 - lr * weight_decay, dtype=dtype, device=step.device)
        size = torch.full_like(count, lr) / over1
    return torch.stack([decay, size.to(dtype), (-over2).sqrt().to(dtype)])
