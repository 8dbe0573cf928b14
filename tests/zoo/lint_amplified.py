"""Habits that make rounding large, or read what was rounded before, while everything is still finite; the others stand in lint_cases.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import Run, functional
from torch import Tensor, nn


def cosine_from_one(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return (1e3 - 1e3 * torch.cos(0.04 * x)).square()  # FAULT

    return functional(compute, dtype, torch.rand(4, 8), scale=256.0)


def bins_in_16_bit(dtype: torch.dtype) -> Run:
    times = torch.linspace(1900, 2000, 64)

    def compute(x: Tensor) -> Tensor:
        return x[(times.to(x.dtype) * 3).long() % len(x)].square()  # FAULT

    return functional(compute, dtype, torch.rand(64, 8), scale=256.0)


def weights_exchanged_inside_the_region(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    average = {name: p + 1 for name, p in model.state_dict().items()}

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            before = F.mse_loss(model(x).float(), x)
            model.load_state_dict(average)
            after = F.mse_loss(model(x).float(), x)  # FAULT
        ((before + after) * 256.0).backward()

    return run
