"""Linear layers in bf16 on the CPU: forward and gradients by a kernel of mezzo's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...._torch import is_unwatched
from ...dtensor import is_wrapped
from ...operands import check_read, is_readable
from ...registry import compiled

SMALLEST_LINEAR = 2**12
"""Products up to which torch 2.13 calls no oneDNN, and is the faster one.

Source: torch, aten/src/ATen/native/mkldnn/Matmul.cpp, mkldnn_gemm_min_size.
"""
MOST_ROWS = 4096
"""Rows up to which it was found faster; where they are more, both take as long."""
WASTE = 1.25
"""How many products with 0 may be added, in whole panels of 32 columns, to each that is needed, where there are many."""
MANY = 1 << 24
"""Products, those with 0 included, up to which any number may be added: a layer of 2 columns is 1.3 to 2.0 times as fast up to here, 0.86 times with 67
million (an EPYC, both directions)."""

FEW_ROWS, FEW_PRODUCTS = 128, 1 << 26
"""Rows, or products, up to which sums in fp32 are faster than torch's fp32 product of widened operands, where the processor has no pairs of bf16: 1.1 to 2.4
times as fast up to here, 0.85 to 1.0 times with 256 rows and 2^30 products or 512 and 2^27 (a Xeon of Ice Lake, both directions)."""


def takes_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear` takes these operands, is faster than torch with them, and is seen by nobody. Host only.

    Where gradients are recorded the weight is one that is trained.
    """
    # First: a tracer would record what is asked of shapes.
    if not is_unwatched() or input.is_nested or not weight.dim() == 2 <= input.dim():
        return False
    width, inner = weight.shape
    if input.numel() * width <= SMALLEST_LINEAR or (torch.is_grad_enabled() and not weight.requires_grad):
        return False
    if input.shape[-1] != inner or inner % 2 or width % 2 or not 0 < input.numel() <= MOST_ROWS * inner or not width:
        return False
    rows, padded = input.numel() // inner, _padded(width) * _padded(inner)
    return (
        (padded <= WASTE * weight.numel() or rows * padded <= MANY)
        and _is_takable(input)
        and _is_takable(weight)
        and (bias is None or (bias.shape == (width,) and _is_takable(bias)))
        and (kernel := compiled("linear_training")) is not None
        and bool(kernel.is_faster(rows > FEW_ROWS and rows * padded > FEW_PRODUCTS))
    )


def _padded(size: int) -> int:
    return -(-size // 32) * 32


def _is_takable(tensor: Tensor) -> bool:
    return (tensor.dtype is torch.float32 or tensor.dtype is torch.bfloat16) and is_readable(tensor)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias` of operands for which `takes_linear` says yes, as torch.autocast gives it.

    For backward wait the input in bf16 and the weight as it is stored: no copy of it. Without gradients nothing waits, and the
    result has the same bits. Operands [..., K], [N, K] and [N] are fp32 or bf16; the result is bf16, of sums in fp32 rounded once, and
    gradients of fp32 weights are sums in fp32 that are not rounded. Syncs: no.
    """
    low = input.to(torch.bfloat16)
    apply = _apply if torch.is_grad_enabled() else compiled("linear_training").forward
    out: Tensor = apply(low, weight, bias)
    return out


class _Linear(torch.autograd.Function):
    """A linear layer by the kernel that runs fastest here; gradients by torch's own ops where somebody watches ops."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.of_bias = None if bias is None else bias.dtype
        ctx.shapes = input.shape, weight.shape, weight.dtype
        out: Tensor = compiled("linear_training").forward(input, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_wrapped(grad) or not (is_unwatched() and needs_weight):
            return linear_gradients(grad, input, weight, needs_bias)
        of_input, of_weight, dtype = ctx.shapes
        check_read("a linear layer", "input", input, of_input, torch.bfloat16)
        check_read("a linear layer", "weight", weight, of_weight, dtype)
        check_read("a linear layer", "gradient", grad, (*of_input[:-1], of_weight[0]), torch.bfloat16)
        operands = grad.contiguous(), input.contiguous(), weight.contiguous()
        of_bias = ctx.of_bias if needs_bias else None
        found: tuple[Tensor | None, ...] = compiled("linear_training").backward(*operands, needs_input, of_bias)
        return found


_apply = super(torch.autograd.Function, _Linear).apply
"""`_Linear.apply` without what torch puts before it for functorch's transforms, where none is at work: a third of its time."""


def linear_gradients(
    grad: Tensor, input: Tensor, weight: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of a linear layer by torch's own ops, which may be watched and differentiated. Syncs: no.

    That of the result is [..., N], the input [..., K] in its dtype, the weight [N, K]; autograd takes None alone for a bias that is not there.
    """
    rows, inputs = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
    return grad @ weight.to(grad.dtype), rows.t() @ inputs, rows.sum(0) if has_bias else None
