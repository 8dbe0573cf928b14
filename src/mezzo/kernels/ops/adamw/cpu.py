"""The AdamW step on the CPU: one compiled pass; `reference.py` defines it and `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from ...backends.cpp.batch import run
from ...backends.cpp.build import library
from ...operands import Operands
from . import reference
from .reference import AdamWRule

SOURCE = Path(__file__).with_suffix(".cpp")


class _AdamWStruct(ctypes.Structure):
    """struct AdamW of cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("lerp1", "keep2", "add2", "eps", "l2")),
        ("amsgrad", ctypes.c_int32),
    )


def step_(operands: Operands, rule: AdamWRule, scalars: Tensor, step: Tensor) -> None:
    """Take one AdamW step; arguments, writes and results are those of `reference.step_`, to the last bit.

    Weights that no kernel can walk, such as slices of something larger, take the reference's way.

    Writes: weights, their aux state, moments; none of them if `found_inf` is set.
    Syncs: no.
    """
    if operands.other:
        reference.step_(operands, rule, scalars, step, operands.other)
    numbers = _AdamWStruct(1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.l2, rule.amsgrad)
    run(_function(), operands, numbers, scalars, step)


@functools.cache
def _function() -> Any:
    return library(SOURCE).mezzo_adamw
