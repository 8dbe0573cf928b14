"""The gradient pass on the CPU: one compiled pass; the folder defines it and `cpu.cpp` computes it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...backends.cpp.batch import address
from ...backends.cpp.build import c_functions
from ...operands import batch_of

SOURCE = Path(__file__).with_suffix(".cpp")


def tensor_norms(grads: Sequence[Tensor]) -> Tensor:
    """Return what `tensor_norms` of the folder returns, within a few ulp. Raises: as `known_norms`. Syncs: no."""
    if not grads:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    return torch.frombuffer(known_norms(grads), dtype=torch.float32)


def known_norms(grads: Sequence[Tensor]) -> array[float]:
    """Return the same as numbers; gradients that are not dense are copied.

    Raises:
        OperandError: one lies outside its storage, or not on the CPU.

    Syncs: no.
    """
    dense = grads if all(map(Tensor.is_contiguous, grads)) else [_dense(grad) for grad in grads]
    norms, given = array("f", [0.0]) * len(dense), batch_of(dense)
    _function("norms")(len(dense), *map(address, given), torch.get_num_threads(), address(norms))
    return norms


def _dense(grad: Tensor) -> Tensor:
    if grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last):  # asked for a tenth of the time
        return grad
    return grad if torch.ops.aten.is_non_overlapping_and_dense(grad) else grad.contiguous()


_function = c_functions(SOURCE, "mezzo_", norms="qPPPiP")
