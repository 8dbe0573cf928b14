"""Habits that make rounding large while everything is still finite; the others stand in lint_cases.py."""

from __future__ import annotations

import torch
from tests.zoo.faulty_forward import Run, functional
from torch import Tensor


def cosine_from_one(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return (1e3 - 1e3 * torch.cos(0.04 * x)).square()  # FAULT

    return functional(compute, dtype, torch.rand(4, 8), scale=256.0)


def bins_in_16_bit(dtype: torch.dtype) -> Run:
    times = torch.linspace(1900, 2000, 64)

    def compute(x: Tensor) -> Tensor:
        return x[(times.to(x.dtype) * 3).long() % len(x)].square()  # FAULT

    return functional(compute, dtype, torch.rand(64, 8), scale=256.0)
