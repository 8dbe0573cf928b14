"""The SGD step by torch's own fused kernel, on accelerators for which this library has none: XPU, MPS, CUDA without Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...._torch import fused_sgd_
from ...backends.torch_lists import masters_of, rate_of, true_grads, write_masters_
from ...operands import Operands
from . import reference
from .reference import SGDRule


def step_(operands: Operands, rule: SGDRule, _: None, step: Tensor) -> None:
    """Take one SGD step: the masters go the way of torch.optim.SGD(fused=True) on fp32 parameters.

    Args:
        operands: as in `reference.step_`; sums that are not fp32 take its way.
        rule: with `lr`.
        step: shape (n,), fp32: steps taken by each, this one included.

    Writes: weights, their aux state, sums; none of them if `found_inf` is set. Syncs: no.
    """
    masters = masters_of(operands)
    if masters is None:
        reference.step_(operands, rule, reference.scalars(step, rule), step)
        return
    grads, decay, maximize = true_grads(operands), rule.weight_decay, operands.grads.maximize
    if rule.dampening != 0 and rule.momentum != 0:
        grads, decay, maximize = _dampened(grads, masters, rule, step, maximize), 0.0, False
    fused_sgd_(
        masters, grads, [one for held in operands.moments.values() for one in held],
        weight_decay=decay, momentum=rule.momentum, lr=rate_of(rule.lr, step.device), dampening=0.0,
        nesterov=rule.nesterov, maximize=maximize, is_first_step=False,  # sums begin as zeros
        found_inf=operands.grads.found_inf,
    )  # fmt: skip
    write_masters_(operands, masters, step)


def _dampened(
    grads: Sequence[Tensor], masters: Sequence[Tensor], rule: SGDRule, step: Tensor, maximize: bool
) -> list[Tensor]:
    """Return what dampening leaves of gradients and decay: all in a weight's first step, which the device alone knows."""
    factors = torch.where(step == 1, 1.0, 1 - rule.dampening).unbind()
    down = [-grad for grad in grads] if maximize else grads
    if rule.weight_decay != 0:
        down = [grad.add(master, alpha=rule.weight_decay) for grad, master in zip(down, masters, strict=True)]
    return [grad * factor for grad, factor in zip(down, factors, strict=True)]
