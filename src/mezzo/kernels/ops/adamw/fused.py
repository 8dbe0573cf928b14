"""The AdamW step by torch's own fused kernel, on accelerators for which this library has none: XPU, MPS, CUDA without Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...._torch import fused_adam_, fused_adamw_
from ...backends.torch_lists import masters_of, rate_of, true_grads, write_masters_
from ...operands import Operands
from . import reference
from .reference import AdamWRule


def step_(operands: Operands, rule: AdamWRule, _: None, step: Tensor) -> None:
    """Take one AdamW step: the masters go the way of torch.optim.AdamW(fused=True) on fp32 parameters.

    Args:
        operands: as in `reference.step_`; moments that are not fp32 take its way.
        rule: with `lr` and `decay`.
        step: shape (n,), fp32: steps taken by each, this one included.

    Writes: weights, their aux state, moments; none of them if `found_inf` is set. Syncs: no.
    """
    masters = masters_of(operands)
    if masters is None:
        reference.step_(operands, rule, reference.scalars(step, rule), step)
        return
    means, squares, *peaks = (list(held) for held in operands.moments.values())
    update_: Any = fused_adamw_ if rule.l2 == 0 else fused_adam_  # overloaded by the kind of rate
    update_(
        masters, true_grads(operands), means, squares, *(peaks or [[]]), list(step.unbind()),
        lr=rate_of(rule.lr, step.device), beta1=rule.beta1, beta2=rule.beta2, weight_decay=rule.l2 or rule.decay,
        eps=rule.eps, amsgrad=rule.amsgrad, maximize=operands.grads.maximize, found_inf=operands.grads.found_inf,
    )  # fmt: skip
    write_masters_(operands, masters, step)
