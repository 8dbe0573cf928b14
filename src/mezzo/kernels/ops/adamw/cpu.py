"""The AdamW step on the CPU: one compiled pass; `reference.py` defines it and `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ...backends.cpp.batch import layout, pack
from ...backends.cpp.build import library
from ...weights import Weights
from ..gradients import ScaledGradients
from . import reference
from .operands import AdamWRule, Moments

SOURCE = Path(__file__).with_suffix(".cpp")


class _Rule(ctypes.Structure):
    """struct AdamW of cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("lerp1", "keep2", "add2", "eps")),
        ("amsgrad", ctypes.c_int32),
    )


def step_(
    weights: Weights, grads: ScaledGradients, moments: Moments, rule: AdamWRule, scalars: Tensor, step: Tensor
) -> None:
    """Take one AdamW step; arguments, writes and results are those of `reference.step_`, to the last bit.

    Weights that are not contiguous, slices of something larger, take the reference's way.

    Writes: weights, their aux state, moments; none of them if `grads.found_inf` is set.
    Syncs: no.
    """
    where = layout(weights, moments.lists)
    if where.other:
        straight, other = where.straight, where.other
        reference.step_(weights.at(other), grads.at(other), moments.at(other), rule, scalars, step)
        if not straight:
            return
        weights, grads, moments = weights.at(straight), grads.at(straight), moments.at(straight)
    packed = pack(weights, grads, moments.lists, scalars, step)
    numbers = _Rule(1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.amsgrad)
    library(SOURCE).mezzo_adamw(ctypes.byref(packed.batch), ctypes.byref(numbers))
    torch.autograd.graph.increment_version(list(weights.values))
