"""A habit that makes rounding large while everything is still finite; the others stand in lint_cases.py."""

from __future__ import annotations

import torch
from tests.zoo.faulty_forward import Run, functional


def cosine_from_one(dtype: torch.dtype) -> Run:
    return functional(
        lambda x: (1e3 - 1e3 * torch.cos(0.04 * x)).square(), dtype, torch.rand(4, 8), scale=256.0
    )  # FAULT
