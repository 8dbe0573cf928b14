"""Linear layers on the CPU, with their gradients; `cpu.cpp` computes them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backends.cpp.build import library
from ...operands import FORMATS, addresses_of

SOURCE = Path(__file__).with_suffix(".cpp")


def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `linear` says, of operands without gaps that `takes_linear` let through; any number of threads gives the same bits. Syncs: no."""
    inner, width = input.shape[-1], weight.shape[0]
    out = input.new_empty((*input.shape[:-1], width))
    to, x, w, b = _addresses(out, input, weight, bias)
    of_weight, of_bias = FORMATS[weight.dtype], FORMATS[weight.dtype if bias is None else bias.dtype]
    rows = input.numel() // inner
    _function("forward")(to, x, w, b, of_weight, of_bias, rows, inner, width, torch.get_num_threads())
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
    dx, dw, db, g, x, w = _addresses(of_input, of_weight, bias, grad, input, weight)
    formats = FORMATS[weight.dtype], FORMATS[weight.dtype if of_bias is None else of_bias]
    rows, threads = grad.numel() // width, torch.get_num_threads()
    if not _function("backward")(dx, dw, db, g, x, w, *formats, rows, inner, width, threads):
        raise MemoryError(
            "there is no memory to lay out a linear layer's weight and input for backward. Write smaller batches."
        )
    return of_input, of_weight, bias


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    found = iter(addresses_of([one for one in tensors if one is not None]))
    return [None if one is None else next(found) for one in tensors]


@functools.cache
def is_faster() -> bool:
    """Whether it is faster than torch's here: the processor multiplies pairs of bf16, and no tiles. Host only."""
    return bool(_function("is_faster")())


@functools.cache
def _function(name: str) -> Any:
    """Return a compiled function, with the types of its arguments."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    function = getattr(library(SOURCE), f"mezzo_linear_{name}")
    function.restype = None if name == "forward" else number
    function.argtypes = {
        "forward": [*[pointer] * 4, *[number] * 2, *[size] * 3, number],
        "backward": [*[pointer] * 6, *[number] * 2, *[size] * 3, number],
        "is_faster": [],
    }[name]
    return function
