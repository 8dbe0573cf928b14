"""The linear layer of few rows on the CPU: each weight is read once, at the speed of memory; `cpu.cpp` computes it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...backends.cpp.build import Kernel
from ...operands import addresses_or_none
from ...registry import is_emulated

_kernel = Kernel("linear", forward="PPPPqqqii", tiles="PPPPqqqii", most_rows="i:i", has_large_cache=":i")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `small_linear` says, of operands that `takes_small_linear` let through. Syncs: no."""
    width, inner = weight.shape
    out = torch.empty((*x.shape[:-1], width), dtype=torch.bfloat16, device="cpu")
    addresses = addresses_or_none([x, weight, out, bias])
    product = _kernel.tiles if most_rows() == 16 else _kernel.forward
    sizes = x.numel() // inner, inner, width, torch.get_num_threads(), has_large_cache()
    product(*addresses, *sizes)
    return out


@functools.cache
def most_rows() -> int:
    """Return the rows up to which this is faster than torch's own here: 4, 8, 16 on tiles of the processor, 32 or 64 beside emulation. Host only."""
    return int(_kernel.most_rows(is_emulated(torch.bfloat16)))


@functools.cache
def has_large_cache() -> bool:
    """Whether this CPU's first-level cache holds 48 KB, not 32. Host only."""
    return bool(_kernel.has_large_cache())
