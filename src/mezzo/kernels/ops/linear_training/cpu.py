"""Linear layers on the CPU, with their gradients; `cpu.cpp` computes them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...backends.cpp.build import Kernel
from ...operands import FORMATS, addresses_or_none

_kernel = Kernel("linear_training", forward="PPPPiiqqqi", backward="PPPPPPiiqqqi:i", is_faster="i:i")


def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `linear` says, of operands without gaps that `takes_linear` let through; any number of threads gives the same bits. Syncs: no."""
    inner, width = input.shape[-1], weight.shape[0]
    out = input.new_empty((*input.shape[:-1], width))
    to, x, w, b = addresses_or_none([out, input, weight, bias])
    of_weight, of_bias = FORMATS[weight.dtype], FORMATS[weight.dtype if bias is None else bias.dtype]
    rows = input.numel() // inner
    _kernel.forward(to, x, w, b, of_weight, of_bias, rows, inner, width, torch.get_num_threads())
    return out


def backward(
    grad: Tensor, input: Tensor, weight: Tensor, needs_input: bool, of_bias: torch.dtype | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return the gradients of input, weight and bias, of operands without gaps; None of an input or a bias where none is wanted.

    Products are summed in fp32, and rounded once where the gradient has 16 bit. `grad` [..., N] and `input` [..., K] are bf16, the
    weight [N, K] fp32 or bf16; `of_bias` is the dtype of its gradient. Syncs: no.
    """
    width, inner = weight.shape
    of_input, of_weight = torch.empty_like(input) if needs_input else None, torch.empty_like(weight)
    bias = None if of_bias is None else weight.new_empty(width, dtype=of_bias)
    dx, dw, db, g, x, w = addresses_or_none([of_input, of_weight, bias, grad, input, weight])
    formats = FORMATS[weight.dtype], FORMATS[weight.dtype if of_bias is None else of_bias]
    rows, threads = grad.numel() // width, torch.get_num_threads()
    if not _kernel.backward(dx, dw, db, g, x, w, *formats, rows, inner, width, threads):
        raise MemoryError(
            "there is no memory to lay out a linear layer's weight and input for backward. Write smaller batches."
        )
    return of_input, of_weight, bias


@functools.cache
def is_faster(has_many_rows: bool = False) -> bool:
    """Whether it is faster than torch's here: the processor multiplies no tiles, and pairs of bf16 where there are many rows. Host only."""
    return bool(_kernel.is_faster(has_many_rows))
