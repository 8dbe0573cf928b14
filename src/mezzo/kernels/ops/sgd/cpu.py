"""The SGD step on the CPU: one compiled pass; `reference.py` defines it and `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...backends.cpp.batch import layout, pack
from ...backends.cpp.build import library
from ...weights import Weights
from ..gradients import ScaledGradients
from . import reference
from .operands import SGDRule

SOURCE = Path(__file__).with_suffix(".cpp")


class _Rule(ctypes.Structure):
    """struct SGD of cpu.cpp."""

    _fields_ = (("weight_decay", ctypes.c_float), ("momentum", ctypes.c_float), ("nesterov", ctypes.c_int32))


def step_(
    weights: Weights, grads: ScaledGradients, sums: Sequence[Tensor], rule: SGDRule, scalars: Tensor, step: Tensor
) -> None:
    """Take one SGD step; arguments, writes and results are those of `reference.step_`, to the last bit.

    Weights that are not contiguous, slices of something larger, take the reference's way.

    Writes: weights, their aux state, sums; none of them if `grads.found_inf` is set.
    Syncs: no.
    """
    where = layout(weights, (sums,))
    if where.other:
        straight, other = where.straight, where.other
        reference.step_(weights.at(other), grads.at(other), [sums[i] for i in other if sums], rule, scalars, step)
        if not straight:
            return
        weights, grads, sums = weights.at(straight), grads.at(straight), [sums[i] for i in straight if sums]
    packed = pack(weights, grads, (sums,), scalars, step)
    numbers = _Rule(rule.weight_decay, rule.momentum, rule.nesterov)
    library(SOURCE).mezzo_sgd(ctypes.byref(packed.batch), ctypes.byref(numbers))
    torch.autograd.graph.increment_version(list(weights.values))
