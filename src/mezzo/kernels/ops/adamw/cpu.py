"""The AdamW step on the CPU: one compiled pass; the folder defines it and `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes

from ...backends.cpp.batch import compiled_step
from .. import adamw as reference
from . import AdamWRule


class _AdamWStruct(ctypes.Structure):
    """struct AdamW of cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("lerp1", "keep2", "add2", "eps", "l2")),
        ("amsgrad", ctypes.c_int32),
    )


def _pack(rule: AdamWRule) -> _AdamWStruct:
    return _AdamWStruct(1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.l2, rule.amsgrad)


step_ = compiled_step("adamw", reference, _pack)
