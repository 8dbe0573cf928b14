"""The gradient pass on the CPU: one compiled pass; the folder defines it and `cpu.cpp` computes it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...backends.cpp.batch import address, compiled_norms
from ...backends.cpp.build import c_functions
from ...operands import addresses_of

SOURCE = Path(__file__).with_suffix(".cpp")

tensor_norms, known_norms = compiled_norms(SOURCE, "mezzo_norms")
_function = c_functions(SOURCE, "mezzo_", add_one="qP")


def add_one_(counts: Sequence[Tensor]) -> None:
    """Add 1 to step counts, each shape () or (1,), fp32, on the CPU, none made in inference mode. Writes: them. Syncs: no."""
    addresses = array("Q", addresses_of(counts))
    torch.autograd.graph.increment_version(counts)
    _function("add_one")(len(addresses), address(addresses))
