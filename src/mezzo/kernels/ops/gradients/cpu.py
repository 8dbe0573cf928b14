"""The gradient pass on the CPU: one compiled pass; the folder defines it and `cpu.cpp` computes it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ...backends.cpp import batch
from ...backends.cpp.build import Kernel
from ...operands import addresses_of

known_norms, tensor_norms = batch.known_norms, batch.tensor_norms
_kernel = Kernel("gradients", add_one="qP")


def add_one_(counts: Sequence[Tensor]) -> None:
    """Add 1 to step counts, each shape () or (1,), fp32, on the CPU, none made in inference mode. Writes: them. Syncs: no."""
    addresses = array("Q", addresses_of(counts))
    torch.autograd.graph.increment_version(counts)
    _kernel.add_one(len(addresses), batch.address(addresses))
