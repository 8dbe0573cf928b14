"""The SGD step by torch's own fused kernel, on accelerators for which this library has none: XPU, MPS, CUDA without Triton."""

from __future__ import annotations

from torch import Tensor

from ...._torch import fused_sgd_
from ...backends.torch_lists import masters_of, rate_of, true_grads, write_masters_
from ...operands import Operands
from . import reference
from .reference import SGDRule


def step_(operands: Operands, rule: SGDRule, _: None, step: Tensor) -> None:
    """Take one SGD step: the masters go the way of torch.optim.SGD(fused=True) on fp32 parameters.

    Args:
        operands: as in `reference.step_`; sums that are not fp32 take its way, and so does dampening, since which step is a
            weight's first is known to the device alone.
        rule: with `lr`.
        step: shape (n,), fp32: steps taken by each, this one included.

    Writes: weights, their aux state, sums; none of them if `found_inf` is set. Syncs: no.
    """
    masters = masters_of(operands) if rule.dampening == 0 else None
    if masters is None:
        reference.step_(operands, rule, reference.scalars(step, rule), step)
        return
    fused_sgd_(
        masters, true_grads(operands), [one for held in operands.moments.values() for one in held],
        weight_decay=rule.weight_decay, momentum=rule.momentum, lr=rate_of(rule.lr, step.device), dampening=0.0,
        nesterov=rule.nesterov, maximize=operands.grads.maximize, is_first_step=False,  # sums begin as zeros
        found_inf=operands.grads.found_inf,
    )  # fmt: skip
    write_masters_(operands, masters, step)
