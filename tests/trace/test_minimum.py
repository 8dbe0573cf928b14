"""Losses that are 0: because they are met, or because rounding or a factor of 0 made them so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo.diagnose as diagnose


@pytest.mark.parametrize(
    ("loss", "answer"),
    [
        (lambda out, y: F.mse_loss(out, y), "healthy"),
        (lambda out, y: (1 - (out - y) ** 2 - 1).clamp(min=0).sum(), "healthy"),
        (lambda out, y: ((out.bfloat16() + 5000.0) - (y.bfloat16() + 5001.0)).square().mean(), "faulty"),
        (lambda out, y: out.square().mean() * 0.0, "faulty"),
    ],
)
def test_a_loss_at_its_minimum_has_no_slope_and_one_that_rounding_or_a_factor_makes_0_is_a_fault(
    loss: Callable[[Tensor, Tensor], Tensor], answer: str
) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer, y = torch.optim.SGD(model.parameters(), lr=0.01), model(x).detach()
    with diagnose.trace() as t:
        for _ in range(33):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    assert t.report.answer == answer, t.report
