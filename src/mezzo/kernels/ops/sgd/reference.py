"""Definition of the SGD step: torch's own operations in torch's own order, on fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...weights import MOMENT_STREAM, Weights, read_master, write_master_
from ..adamw.reference import store_means_
from ..gradients import ScaledGradients
from ..rounding import random_key
from .operands import SGDRule


def step_(
    weights: Weights, grads: ScaledGradients, sums: Sequence[Tensor], rule: SGDRule, scalars: Tensor, step: Tensor
) -> None:
    """Take one SGD step.

    Masters, gradients and running sums are computed in fp32 (fp64 for fp64 weights), whatever they are stored in. For
    fp32 sums the masters go the way of torch.optim.SGD on fp32 parameters, bit for bit.

    Args:
        weights: what to update.
        grads: as many, in the same shapes.
        sums: as many, in the same shapes, fp32 or bf16; empty without momentum.
        rule: the constant numbers.
        scalars: shape (3,) from `sgd_scalars`.
        step: shape (), fp32: steps taken, this one included; decides the random bits.

    Writes: weights, their aux state, sums; none of them if `grads.found_inf` is set.
    Syncs: no.
    Source: Sutskever et al. 2013, in torch's form; README.md of this folder.
    """
    rate, keep, add = scalars.unbind()
    skip = grads.skip
    for index, value in enumerate(weights.values):
        aux = weights.aux[index] if weights.aux else None
        master = read_master(weights.mode, value, aux)
        grad = grads.read(index, master.dtype)
        if rule.weight_decay != 0:
            grad = grad.add(master, alpha=rule.weight_decay)
        if rule.momentum != 0:
            total = (sums[index].to(master.dtype) * keep).addcmul_(grad, add)
            key = random_key(weights.seeds[index], step, MOMENT_STREAM)
            store_means_((sums[index],), (total,), key, skip, weights.offset(index))
            grad = grad.add(total, alpha=rule.momentum) if rule.nesterov else total
        write_master_(weights, index, master.addcmul(grad, rate), step, skip)
