"""The AdamW step by torch's own fused kernel, on accelerators for which this library has none: XPU, MPS, CUDA without Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...._torch import fused_adam_, fused_adamw_
from ...backends.torch_lists import rate_of, true_grads, with_masters
from ...operands import Operands
from .. import adamw as reference
from . import AdamWRule


def step_(operands: Operands, rule: AdamWRule, _: None, step: Tensor) -> None:
    """Take one AdamW step: the masters go the way of torch.optim.AdamW(fused=True) on fp32 parameters, with the rate and decay of the rule.

    Moments that are not fp32 take the way of `reference.step_`, end to end; weights that lie in pieces too.

    Writes: weights, their aux state, moments; none of them if `found_inf` is set. Syncs: no.
    """
    update_: Any = fused_adamw_ if rule.l2 == 0 else fused_adam_  # overloaded by the kind of rate
    for masters, given, counts in with_masters(reference, operands, rule, step):
        means, squares, *peaks = (list(held) for held in given.moments.values())
        update_(
            masters, true_grads(given), means, squares, *(peaks or [[]]), counts,
            lr=rate_of(rule.lr, step.device), beta1=rule.beta1, beta2=rule.beta2, weight_decay=rule.l2 or rule.decay,
            eps=rule.eps, amsgrad=rule.amsgrad, maximize=given.grads.maximize, found_inf=given.grads.found_inf,
        )  # fmt: skip
