"""What torch's fused optimizer kernels take: fp32 masters and gradients as lists, and a rate."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._torch import foreach_copy_, foreach_mul
from ..operands import Operands
from ..weights import read_master, write_master_


def masters_of(operands: Operands) -> list[Tensor] | None:
    """Return the fp32 masters of all weights, the weights themselves where they are it; None where a moment is not fp32.

    Syncs: no.
    """
    if any(one.dtype is not torch.float32 for held in operands.moments.values() for one in held):
        return None
    weights = operands.weights
    if not weights.aux:
        return [read_master(weights.mode, value, None) for value in weights.values]
    return [read_master(weights.mode, value, aux) for value, aux in zip(weights.values, weights.aux, strict=True)]


def true_grads(operands: Operands) -> list[Tensor]:
    """Return the gradients in fp32, unscaled and clipped; themselves where nothing is to be done. Syncs: no."""
    grads = list(operands.grads.values)
    if any(grad.dtype is not torch.float32 for grad in grads):
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        foreach_copy_(wide, grads)
        grads = wide
    for factor in (operands.grads.inv_scale, operands.grads.clip_coef):
        if factor is not None:
            grads = list(foreach_mul(grads, factor.reshape(())))
    return grads


def rate_of(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a learning rate as the kernels take it: a number, or a tensor of shape () on the device. Syncs: no."""
    if not isinstance(lr, Tensor):
        return lr
    return lr.detach().reshape(()) if lr.device == device else float(lr)


def write_masters_(operands: Operands, masters: list[Tensor], step: Tensor) -> None:
    """Store the masters of 16-bit weights, and have caches of casts see that weights were written.

    Writes: weights and their aux state, unless `found_inf` is set. Syncs: no.
    """
    weights, skip = operands.weights, operands.grads.skip
    if weights.mode == "none":
        torch.autograd.graph.increment_version(list(weights.values))
        return
    for index, master in enumerate(masters):
        write_master_(weights, index, master, step[index], skip)
