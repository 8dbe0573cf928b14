"""Definition of the SGD step: torch's own operations in torch's own order, on fp32 masters, and the numbers it takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...operands import Operands
from ...weights import store_means_, write_master_
from ..adamw import is_counted_on_host, rate_on, rows_by_count


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDRule:
    """The numbers of SGD, as a group has them.

    Attributes:
        weight_decay: times the weight, added to the gradient.
        momentum: decay of the running sum of gradients; 0 keeps none.
        nesterov: step along gradient plus momentum times sum, instead of the sum.
        lr: learning rate, which kernels of torch's take as it is; mezzo's own read it from `scalars`.
        dampening: likewise.
    """

    weight_decay: float
    momentum: float
    nesterov: bool = False
    lr: float | Tensor = 0.0
    dampening: float = 0.0


def scalars(step: Tensor, rule: SGDRule, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return three numbers for each parameter, computed where the step counts lie, as `adamw.scalars`. Syncs: no.

    Returns:
        Shape (n, 3), `dtype`, the device of `step`: -lr, the factor of the running sum, which is 0 in the first step
        and then the momentum, and the factor of the gradient, which is 1 in the first step and then 1 - dampening. Without
        momentum the last two mean nothing.
    """
    lr, dampening = rule.lr, rule.dampening
    if rule.momentum == 0 and not isinstance(lr, Tensor):
        is_kept = step.device.type == "cpu" and not torch.compiler.is_compiling()
        return (_all_of_one_rate if is_kept else _all_of_one_rate.__wrapped__)(step.shape, lr, dtype, step.device)
    if is_counted_on_host(step, lr):
        rate = float(lr)
        first, later = (-rate, 0.0, 1.0), (-rate, rule.momentum, 1 - dampening)
        return rows_by_count(step, lambda count: first if count == 1 else later, dtype)
    one = torch.ones_like(step, dtype=dtype)
    rates = rate_on(step.device, lr, dtype) * one if isinstance(lr, Tensor) else one * lr
    keep = torch.where(step == 1, 0 * one, one * rule.momentum)
    add = torch.where(step == 1, one, one * (1 - dampening))
    return torch.stack([-rates, keep, add], dim=-1)


@functools.lru_cache(maxsize=64)
def _all_of_one_rate(shape: torch.Size, lr: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers of parameters without momentum, which no step writes: from step to step they are the same."""
    return torch.full((*shape, 3), -lr, dtype=dtype, device=device)


def step_(
    operands: Operands, rule: SGDRule, scalars: Tensor, step: Tensor, indices: Sequence[int] | None = None
) -> None:
    """Take one SGD step, by the arguments and in the precision of `adamw.step_`; with momentum the moment is momentum_buffer.

    Writes: weights, their aux state, sums; none of them if `found_inf` is set. Syncs: no.
    Source: Sutskever et al. 2013, in torch's form; README.md of this folder.
    """
    weights, skip = operands.weights, operands.grads.skip
    for index in range(len(weights.values)) if indices is None else indices:
        rate, keep, add = scalars[index].unbind()
        master = weights.master(index)
        grad = operands.grads.read(index, master.dtype)
        if rule.weight_decay != 0:
            grad = grad.add(master, alpha=rule.weight_decay)
        if rule.momentum != 0:
            (sum_,) = [held[index] for held in operands.moments.values()]
            total = (sum_.to(master.dtype) * keep).addcmul_(grad, add)
            store_means_((sum_,), (total,), weights, index, step[index], skip)
            grad = grad.add(total, alpha=rule.momentum) if rule.nesterov else total
        write_master_(weights, index, master.addcmul(grad, rate), step[index], skip)
