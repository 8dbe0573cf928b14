"""Definition of the AdamW step: torch's own operations in torch's own order, on fp32 masters, and the numbers it takes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ....formats import widest
from ...operands import Operands
from ...weights import store_means_, write_, write_master_


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWRule:
    """The numbers of AdamW, as a group has them.

    Attributes:
        beta1: decay of the mean of gradients; in [0, 1).
        beta2: decay of the mean of squares; in [0, 1).
        eps: added to the root of the mean of squares.
        amsgrad: divide by the largest mean of squares so far.
        l2: weight decay added to the gradient, as torch.optim.Adam does; 0 for AdamW.
        lr: learning rate, which kernels of torch's take as it is; mezzo's own read it from `scalars`.
        decay: decoupled weight decay, likewise.
    """

    beta1: float
    beta2: float
    eps: float
    amsgrad: bool = False
    l2: float = 0.0
    lr: float | Tensor = 0.0
    decay: float = 0.0


def scalars(step: Tensor, rule: AdamWRule, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return three numbers for each parameter, computed where the step counts lie. Syncs: no.

    Step counts, this step included, have shape (n,) and fp32; a rate that is a tensor has shape () or (1,), on their device or the CPU.

    Returns:
        Shape (n, 3), `dtype`, that of the computation, the device of `step`: the factor 1 - lr * decay of the weight, the negative step
        size -lr / (1 - beta1^t), and sqrt(1 - beta2^t). Computed in fp64 where the device has it.
    """
    lr = rule.lr
    if is_counted_on_host(step, lr):
        return rows_by_count(step, lambda count: _numbers(count, rule, float(lr)), dtype)
    count = step.to(widest(step.device))
    # beta^t - 1, the corrections with their signs changed
    over1 = torch.expm1(count * math.log(rule.beta1)) if rule.beta1 > 0 else -torch.ones_like(count)
    over2 = torch.expm1(count * math.log(rule.beta2)) if rule.beta2 > 0 else -torch.ones_like(count)
    if isinstance(lr, Tensor):
        rate = rate_on(step.device, lr, dtype)
        decay, size = (1 - rate * rule.decay).expand_as(step), rate / over1.to(dtype)
    else:
        decay = torch.full_like(step, 1 - lr * rule.decay, dtype=dtype)
        size = torch.full_like(count, lr) / over1
    return torch.stack([decay, size.to(dtype), (-over2).sqrt().to(dtype)], dim=-1)


def _numbers(count: float, rule: AdamWRule, lr: float) -> Row:
    over1, over2 = [math.expm1(count * math.log(beta)) if beta > 0 else -1.0 for beta in (rule.beta1, rule.beta2)]
    return 1 - lr * rule.decay, lr / over1, math.sqrt(-over2)


Row = tuple[float, float, float]
"""What a kernel takes of one parameter."""


def is_counted_on_host(step: Tensor, lr: float | Tensor) -> bool:
    """Whether the host knows what a step's numbers are made of, without waiting: then no tensor op is run for them. Host only."""
    is_known = type(step) is Tensor and step.device.type == "cpu" and not isinstance(lr, Tensor)
    return is_known and not torch.compiler.is_compiling()


def rows_by_count(step: Tensor, row_of: Callable[[float], Row], dtype: torch.dtype) -> Tensor:
    """Return a row for each parameter, computed once for each number of steps; where none was taken nothing is read.

    Step counts have shape (n,) and lie on the CPU; `row_of` is asked about 1 or more. Shape (n, 3), `dtype`. Syncs: no.
    """
    counts = step.tolist()
    rows = {count: row_of(count) if count >= 1 else (1.0, 0.0, 1.0) for count in set(counts)}
    numbers = array("d" if dtype is torch.float64 else "f", chain.from_iterable(map(rows.__getitem__, counts)))
    return torch.frombuffer(numbers, dtype=dtype).view(-1, 3)


def rate_on(device: torch.device, lr: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a learning rate of shape () or (1,) on a device, as shape (). Syncs: no.

    One that lies on the host is read there and written by a kernel: copying it would have the host wait.
    """
    rate = lr.detach().reshape(())
    if rate.device.type != "cpu" or device.type == "cpu" or torch.compiler.is_compiling():
        return rate.to(device, dtype)
    return torch.full((), rate.to(dtype).item(), dtype=dtype, device=device)


def step_(
    operands: Operands, rule: AdamWRule, scalars: Tensor, step: Tensor, indices: Sequence[int] | None = None
) -> None:
    """Take one AdamW step.

    Masters, gradients and means are computed in fp32 (fp64 for fp64 weights), whatever they are stored in. For fp32
    means the masters go the way of torch.optim.AdamW on fp32 parameters, bit for bit.

    Moments are exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq, and `scalars` those of `scalars`. `step`, shape (n,), fp32, counts the
    steps of each weight, this one included, and decides the random bits; `indices` are those stepped, None for all.

    Writes: weights, their aux state, moments; none of them if `found_inf` is set. Syncs: no.
    Source: Loshchilov and Hutter 2019, algorithm 2; README.md of this folder.
    """
    weights, skip = operands.weights, operands.grads.skip
    for index in range(len(weights.values)) if indices is None else indices:
        decay, size, unbias = scalars[index].unbind()
        mean_, square_, *peak_ = [held[index] for held in operands.moments.values()]
        master = weights.master(index) * decay
        grad = operands.grads.read(index, master.dtype)
        if rule.l2 != 0:
            grad = grad.add(master, alpha=rule.l2)
        mean = mean_.to(master.dtype).lerp(grad, 1 - rule.beta1)
        square = square_.to(master.dtype) * rule.beta2
        square.addcmul_(grad, grad, value=1 - rule.beta2)
        peak = torch.maximum(peak_[0].to(master.dtype), square) if rule.amsgrad else square
        spread = (peak.sqrt() / unbias).add_(rule.eps)
        master.addcdiv_(mean * size, spread)

        write_master_(weights, index, master, step[index], skip)
        store_means_((mean_, square_), (mean, square), weights, index, step[index], skip)
        if rule.amsgrad:
            write_(peak_[0], peak.to(peak_[0].dtype), skip)
