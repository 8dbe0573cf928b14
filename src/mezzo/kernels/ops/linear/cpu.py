"""The linear layer of few rows on the CPU: each weight is read once, at the speed of memory; `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backends.cpp.build import library
from ...operands import batch_of
from ...registry import is_emulated

SOURCE = Path(__file__).with_suffix(".cpp")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `small_linear` says, of operands that `reads_faster` let through. Syncs: no."""
    width, inner = weight.shape
    out = torch.empty((*x.shape[:-1], width), dtype=torch.bfloat16, device="cpu")
    _, addresses, _ = batch_of([x, weight, out, *([] if bias is None else [bias])])
    product = _function("mezzo_linear_tiles" if most_rows() == 16 else "mezzo_linear")
    sizes = x.numel() // inner, inner, width, torch.get_num_threads(), has_large_cache()
    product(*addresses, *[None] * (bias is None), *sizes)
    return out


@functools.cache
def most_rows() -> int:
    """Return the rows up to which this is faster than torch's own here: 4, 8, 16 on tiles of the processor, 32 or 64 beside emulation. Host only."""
    return int(library(SOURCE).mezzo_linear_most_rows(is_emulated(torch.bfloat16)))


@functools.cache
def has_large_cache() -> bool:
    """Whether this CPU's first-level cache holds 48 KB, not 32. Host only."""
    name = "SC_LEVEL1_DCACHE_SIZE"
    return name in getattr(os, "sysconf_names", ()) and os.sysconf(name) >= 48 * 1024


@functools.cache
def _function(name: str) -> Any:
    """Return a compiled product, with the types of its arguments."""
    function = getattr(library(SOURCE), name)
    function.argtypes = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, *[ctypes.c_int32] * 2)
    function.restype = None
    return function
