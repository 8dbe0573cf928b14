"""Convolutions in bf16 on the CPU: torch's kernels, but for the gradients of weight and bias, which are computed by one of mezzo's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...._torch import is_unwatched
from ...dtensor import is_wrapped
from ...operands import is_readable
from ...registry import compiled

Pair = tuple[int, int]

LARGEST = 32 * 32
"""Pixels of a picture up to which the kernel was found faster; in larger ones laying the pixels out anew takes what it gains."""
SMALLEST = 2**25
"""Products from which on it outweighs an autograd function in Python."""
MOST_PIXELS = 2**21
"""Elements of an input up to which it is faster where no tap shares them with another: there the kernel is no larger than the stride."""
WASTE = 1.25
"""How many products with 0 may be added, in whole blocks of 8 by 32 channels and in pairs of pictures, to each that is needed."""


def may_take_convolution(input: Tensor, weight: Tensor) -> bool:
    """Whether a convolution without much padding can have the products that `takes_convolution` asks for: the cheapest look. Host only."""
    return input.dim() == weight.dim() == 4 and input.numel() * weight.numel() >= SMALLEST * input.shape[1]


def takes_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> bool:
    """Whether `convolution` takes these operands, of one group without dilation, computes the gradient of the weight faster than torch, and is seen by nobody. Host only."""
    if not (input.dim() == weight.dim() == 4 and 0 < input.shape[2] * input.shape[3] <= LARGEST):
        return False
    (batch, inside, height, width), (outside, own, *taps) = input.shape, weight.shape
    rows, columns = [
        (size + 2 * pad - tap) // step + 1
        for size, pad, tap, step in zip((height, width), padding, taps, stride, strict=True)
    ]
    if min(rows, columns) <= 0 or own != inside or batch * rows * columns * weight.numel() < SMALLEST:
        return False
    in_blocks = _padded(batch, 2) * _padded(inside, 8) * _padded(outside, 32)
    return (
        (math.prod(taps) > math.prod(stride) or input.numel() <= MOST_PIXELS)
        and in_blocks <= WASTE * batch * inside * outside
        and torch.is_grad_enabled()
        and weight.requires_grad
        and is_unwatched()
        and all([is_readable(one) for one in (input, weight, *([] if bias is None else [bias]))])
        and (kernel := compiled("convolution")) is not None
        and bool(kernel.is_faster())
    )


def _padded(size: int, block: int) -> int:
    return -(-size // block) * block


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Return the convolution of operands for which `takes_convolution` says yes: torch's, to the bit; [B, O, rows, columns], bf16.

    For backward wait input [B, I, H, W] and weight [O, I, R, C], bf16, as with torch's own. Padding is with zeros, on each side. Syncs: no.
    """
    out: Tensor = _Convolution.apply(input, weight, bias, stride, padding)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Convolution(torch.autograd.Function):
    """torch's convolution, with the gradient of its weight by the kernel that runs fastest here; torch's own where somebody watches ops."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.options = stride, padding
        return torch.conv2d(input, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        own: tuple[Tensor | None, ...] = ()
        if not torch.is_grad_enabled() and not is_wrapped(grad) and is_unwatched() and needs_weight:
            grad = grad.contiguous()
            own = compiled("convolution").weight_gradient(grad, input, weight, *ctx.options, needs_bias)
        wanted = [needs_input, needs_weight and not own, needs_bias and not own]
        sizes, of_input, torchs = [weight.shape[0]] if wanted[2] else None, None, []
        if any(wanted):
            of_input, *torchs = torch.ops.aten.convolution_backward.default(
                grad, input, weight, sizes, *ctx.options, [1, 1], False, [0, 0], 1, wanted
            )
        return of_input, *(own or torchs), None, None
