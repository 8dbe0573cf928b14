"""The linear layer of few rows on the CPU: each weight is read once, at the speed of memory; `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backends.cpp.build import library
from ...operands import batch_of

SOURCE = Path(__file__).with_suffix(".cpp")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` for operands that `reads_faster` let through. Syncs: no.

    Args:
        x: [..., K], bf16, at most `most_rows()` rows.
        weight: [N, K], bf16.
        bias: [N], bf16, or None.

    Returns:
        [..., N], bf16: sums in fp32, rounded to nearest.
    """
    width, inner = weight.shape
    out = torch.empty((*x.shape[:-1], width), dtype=torch.bfloat16, device="cpu")
    _, addresses, _ = batch_of([x, weight, out, *([] if bias is None else [bias])])
    pointers = (*addresses, *[None] * (bias is None))
    product = _function("mezzo_linear" if most_rows() <= 8 else "mezzo_linear_tiles")
    product(*pointers, x.numel() // inner, inner, width, torch.get_num_threads())
    return out


@functools.cache
def most_rows() -> int:
    """Return the rows up to which this is faster than torch's own here: 4, 8, or 16 on tiles of the processor. Host only."""
    function = library(SOURCE).mezzo_linear_most_rows
    function.restype = ctypes.c_int64
    return int(function())


@functools.cache
def _function(name: str) -> Any:
    """Return a compiled product, with the types of its arguments."""
    function = getattr(library(SOURCE), name)
    function.argtypes = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int32)
    function.restype = None
    return function
