"""The gradient pass on the CPU: one compiled pass; `reference.py` defines it and `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...backends.cpp.batch import address
from ...backends.cpp.build import library
from ...operands import batch_of

SOURCE = Path(__file__).with_suffix(".cpp")


def tensor_norms(grads: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient; arguments as for `reference.tensor_norms`.

    Returns:
        Shape (len(grads),), fp32; within a few ulp of the reference. Gradients that are not dense are copied.

    Raises:
        OperandError: one that lies outside its storage, or not on the CPU.

    Syncs: no.
    """
    dense = grads if all(map(Tensor.is_contiguous, grads)) else [_dense(grad) for grad in grads]
    norms = torch.empty(len(dense), dtype=torch.float32, device="cpu")
    numbers = batch_of(dense)
    library(SOURCE).mezzo_norms(
        ctypes.c_int64(len(dense)),
        *[ctypes.c_void_p(address(held)) for held in numbers],
        ctypes.c_int32(torch.get_num_threads()),
        ctypes.c_void_p(norms.data_ptr()),
    )
    return norms


def _dense(grad: Tensor) -> Tensor:
    return grad if torch.ops.aten.is_non_overlapping_and_dense(grad) else grad.contiguous()
