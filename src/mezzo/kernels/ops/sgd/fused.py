"""The SGD step by torch's own fused kernel, on accelerators for which this library has none: XPU, MPS, CUDA without Triton."""

from __future__ import annotations

from torch import Tensor

from ...._torch import fused_sgd_
from ...backends.torch_lists import rate_of, true_grads, with_masters
from ...operands import Operands
from .. import sgd as reference
from . import SGDRule


def step_(operands: Operands, rule: SGDRule, _: None, step: Tensor) -> None:
    """Take one SGD step: the masters go the way of torch.optim.SGD(fused=True) on fp32 parameters, with the rate of the rule.

    Sums that are not fp32 or dampened take the way of `reference.step_`, end to end; weights that lie in pieces too.

    Writes: weights, their aux state, sums; none of them if `found_inf` is set. Syncs: no.
    """
    # how much of the first gradient is left out the device alone knows, and torch's kernel asks the host
    is_dampened = rule.dampening != 0 and rule.momentum != 0
    for masters, given, _counts in with_masters(reference, operands, rule, step, can_fuse=not is_dampened):
        fused_sgd_(
            masters, true_grads(given), [one for held in given.moments.values() for one in held],
            weight_decay=rule.weight_decay, momentum=rule.momentum, lr=rate_of(rule.lr, step.device), dampening=0.0,
            nesterov=rule.nesterov, maximize=given.grads.maximize, is_first_step=False,  # sums begin as zeros
            found_inf=given.grads.found_inf,
        )  # fmt: skip
