"""Definition of the SGD step: torch's own operations in torch's own order, on fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..adamw.reference import store_means_
from ..gradients import ScaledGradients
from ..rounding import noise_key
from ..weights import MOMENT_NOISE, Weights, read_master, write_master_
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
        step: shape (), fp32: steps taken, this one included; decides the noise.

    Writes: weights, what is kept beside them, sums; none of them if `grads.found_inf` is set.
    Syncs: no.
    Source: Sutskever et al. 2013, in torch's form; README.md of this folder.
    """
    rate, keep, add = scalars.unbind()
    blocked = grads.blocked
    for place, value in enumerate(weights.values):
        kept = weights.kept[place] if weights.kept else None
        master = read_master(weights.mode, value, kept)
        grad = grads.read(place, master.dtype)
        if rule.weight_decay != 0:
            grad = grad.add(master, alpha=rule.weight_decay)
        if rule.momentum != 0:
            total = (sums[place].to(master.dtype) * keep).addcmul_(grad, add)
            key = noise_key(weights.seeds[place], step, MOMENT_NOISE)
            store_means_((sums[place],), (total,), key, blocked, weights.first(place))
            grad = grad.add(total, alpha=rule.momentum) if rule.nesterov else total
        write_master_(weights, place, master.addcmul(grad, rate), step, blocked)
