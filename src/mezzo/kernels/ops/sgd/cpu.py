"""The SGD step on the CPU: one compiled pass; the folder defines it and `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes

from ...backends.cpp.batch import compiled_step
from .. import sgd as reference
from . import SGDRule


class _SGDStruct(ctypes.Structure):
    """struct SGD of cpu.cpp."""

    _fields_ = (("weight_decay", ctypes.c_float), ("momentum", ctypes.c_float), ("nesterov", ctypes.c_int32))


def _pack(rule: SGDRule) -> _SGDStruct:
    return _SGDStruct(rule.weight_decay, rule.momentum, rule.nesterov)


step_ = compiled_step("sgd", reference, _pack)
