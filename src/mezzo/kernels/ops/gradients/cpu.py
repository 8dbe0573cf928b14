"""The gradient pass on the CPU: one compiled pass; `reference.py` defines it and `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    return (
        torch.frombuffer(known_norms(grads), dtype=torch.float32)
        if grads
        else torch.zeros(0, dtype=torch.float32, device="cpu")
    )


def known_norms(grads: Sequence[Tensor]) -> array[float]:
    """Return as many numbers of fp32; arguments and errors are those of `tensor_norms`. Syncs: no."""
    dense = grads if all(map(Tensor.is_contiguous, grads)) else [_dense(grad) for grad in grads]
    norms, numbers = array("f", bytes(4 * len(dense))), batch_of(dense)
    _function()(len(dense), *map(address, numbers), torch.get_num_threads(), address(norms))
    return norms


@functools.cache
def _function() -> Any:
    """Return the compiled pass, with the types of its arguments."""
    function = library(SOURCE).mezzo_norms
    function.argtypes = (ctypes.c_int64, *[ctypes.c_void_p] * 3, ctypes.c_int32, ctypes.c_void_p)
    return function


def _dense(grad: Tensor) -> Tensor:
    if grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last):  # asked for a tenth of the time
        return grad
    return grad if torch.ops.aten.is_non_overlapping_and_dense(grad) else grad.contiguous()
