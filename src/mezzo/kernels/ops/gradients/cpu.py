"""The gradient pass on the CPU: one compiled pass; `reference.py` defines it and `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...backends.cpp.batch import FORMATS, address, pointers, sizes
from ...backends.cpp.build import library

SOURCE = Path(__file__).with_suffix(".cpp")


def tensor_norms(grads: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient; arguments as for `reference.tensor_norms`.

    Returns:
        Shape (len(grads),), fp32; within a few ulp of the reference. Gradients that are not dense are copied.

    Syncs: no.
    """
    is_straight = all([grad.is_contiguous() for grad in grads])
    dense = grads if is_straight else [grad if dense_in_memory(grad) else grad.contiguous() for grad in grads]
    norms = torch.empty(len(dense), dtype=torch.float32)
    lengths, indices = sizes(dense), pointers(dense)
    library(SOURCE).mezzo_norms(
        ctypes.c_int64(len(dense)),
        ctypes.c_void_p(address(lengths)),
        ctypes.c_void_p(address(indices)),
        ctypes.c_int32(FORMATS[grads[0].dtype]),
        ctypes.c_int32(torch.get_num_threads()),
        ctypes.c_void_p(norms.data_ptr()),
    )
    return norms


def dense_in_memory(tensor: Tensor) -> bool:
    """Say whether a tensor's elements fill a stretch of memory, in any order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
