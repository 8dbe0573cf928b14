"""A habit that makes rounding large while everything is still finite; the others stand in lint_cases.py."""

from __future__ import annotations

import torch
from tests.zoo.faulty_forward import Run, functional


def cosine_from_one(dtype: torch.dtype) -> Run:
    return functional(lambda x: 1e4 * (1 - torch.cos(1e-2 * x)), dtype, torch.rand(4, 8), scale=256.0)  # FAULT
