"""Definition of the SGD step: torch's own operations in torch's own order, on fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...operands import Operands
from ...weights import MOMENT_STREAM, read_master, write_master_
from ..adamw.reference import store_means_
from ..rounding import random_key
from .rule import SGDRule


def step_(
    operands: Operands, rule: SGDRule, scalars: Tensor, step: Tensor, indices: Sequence[int] | None = None
) -> None:
    """Take one SGD step.

    Masters, gradients and running sums are computed in fp32 (fp64 for fp64 weights), whatever they are stored in. For
    fp32 sums the masters go the way of torch.optim.SGD on fp32 parameters, bit for bit.

    Args:
        operands: weights, gradients and, with momentum, momentum_buffer.
        rule: the constant numbers.
        scalars: shape (n, 3) from `sgd_scalars`.
        step: shape (n,), fp32: steps taken by each, this one included; decides the random bits.
        indices: of the weights to step; None: all.

    Writes: weights, their aux state, sums; none of them if `found_inf` is set.
    Syncs: no.
    Source: Sutskever et al. 2013, in torch's form; README.md of this folder.
    """
    weights, skip = operands.weights, operands.grads.skip
    for index in range(len(weights.values)) if indices is None else indices:
        rate, keep, add = scalars[index].unbind()
        aux = weights.aux[index] if weights.aux else None
        master = read_master(weights.mode, weights.values[index], aux)
        grad = operands.grads.read(index, master.dtype)
        if rule.weight_decay != 0:
            grad = grad.add(master, alpha=rule.weight_decay)
        if rule.momentum != 0:
            (sum_,) = [held[index] for held in operands.moments.values()]
            total = (sum_.to(master.dtype) * keep).addcmul_(grad, add)
            key = random_key(weights.seeds[index], step[index], MOMENT_STREAM)
            store_means_((sum_,), (total,), key, skip, weights.offset(index))
            grad = grad.add(total, alpha=rule.momentum) if rule.nesterov else total
        write_master_(weights, index, master.addcmul(grad, rate), step[index], skip)
