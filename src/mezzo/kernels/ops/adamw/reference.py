"""Definition of the AdamW step: torch's own operations in torch's own order, on fp32 masters."""

from __future__ import annotations

import torch
from torch import Tensor

from ...weights import MOMENT_STREAM, Weights, read_master, write_, write_master_
from ..gradients import ScaledGradients
from ..rounding import random_bits, random_key, stochastic_round
from .operands import AdamWRule, Moments


def step_(
    weights: Weights, grads: ScaledGradients, moments: Moments, rule: AdamWRule, scalars: Tensor, step: Tensor
) -> None:
    """Take one AdamW step.

    Masters, gradients and means are computed in fp32 (fp64 for fp64 weights), whatever they are stored in. For fp32
    means the masters go the way of torch.optim.AdamW on fp32 parameters, bit for bit.

    Args:
        weights: what to update.
        grads: as many, in the same shapes.
        moments: as many, in the same shapes.
        rule: the constant numbers.
        scalars: shape (3,) from `adamw_scalars`.
        step: shape (), fp32: steps taken, this one included; decides the random bits.

    Writes: weights, their aux state, moments; none of them if `grads.found_inf` is set.
    Syncs: no.
    Source: Loshchilov and Hutter 2019, algorithm 2; README.md of this folder.
    """
    decay, size, unbias = scalars.unbind()
    skip = grads.skip
    for index, value in enumerate(weights.values):
        aux = weights.aux[index] if weights.aux else None
        master = read_master(weights.mode, value, aux) * decay
        grad = grads.read(index, master.dtype)
        mean = moments.means[index].to(master.dtype).lerp(grad, 1 - rule.beta1)
        square = moments.squares[index].to(master.dtype) * rule.beta2
        square.addcmul_(grad, grad, value=1 - rule.beta2)
        peak = torch.maximum(moments.peaks[index].to(master.dtype), square) if rule.amsgrad else square
        spread = (peak.sqrt() / unbias).add_(rule.eps)
        master.addcdiv_(mean * size, spread)

        write_master_(weights, index, master, step, skip)
        key = random_key(moments.seeds[index], step, MOMENT_STREAM)
        offset = weights.offset(index)
        store_means_((moments.means[index], moments.squares[index]), (mean, square), key, skip, offset)
        if rule.amsgrad:
            write_(moments.peaks[index], peak.to(moments.peaks[index].dtype), skip)


def store_means_(
    targets: tuple[Tensor, ...], means: tuple[Tensor, ...], key: Tensor, skip: Tensor | None, offset: int = 0
) -> None:
    """Write one or two running means, rounding bf16 ones stochastically.

    A running mean moves by (1 - beta) of itself, 0.1 % for beta 0.999; bf16 spacing is 0.4 to 0.8 %. Rounded to nearest it
    would rise with large gradients and never fall again.

    Args:
        targets: any shapes; fp32, bf16 or fp64.
        means: the shapes of `targets`; fp32 or fp64.
        key: of the random bits; each mean takes its own 16 of the 32 bits.
        skip: shape (), bool: write nothing; None: write.
        offset: index of the first element, for the random bits.

    Writes: `targets`. Syncs: no.
    """
    if targets[0].dtype is not torch.bfloat16:
        for target, mean in zip(targets, means, strict=True):
            write_(target, mean, skip)
        return
    bits = random_bits(key, means[0], offset)
    for index, (target, mean) in enumerate(zip(targets, means, strict=True)):
        write_(target, stochastic_round(mean, torch.bfloat16, bits >> (16 * index)), skip)
