"""What a program multiplies by a factor near 1, again and again, in 16 bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport

BF16, FP32 = torch.bfloat16, torch.float32


def decayed(state: Tensor, factor: float, steps: int, *, is_written: bool = False, is_new: bool = False) -> TraceReport:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with diagnose.trace(model) as t:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if is_written:  # as gradients are that a clip scales by almost 1
                state.copy_(torch.ones(()))
            if is_new:
                state = state * factor
            else:
                state.mul_(factor)
    return t.report


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(("shape", "steps"), [((), 67), ((4,), 4)])
def test_a_decay_that_16_bit_rounds_away_is_named(shape: tuple[int, ...], steps: int, is_new: bool) -> None:
    [found] = decayed(torch.full(shape, 0.1, dtype=BF16), 0.9985, steps, is_new=is_new).findings
    assert (found.verdict, found.op) == ("lost-update", "mul") and found.frame is not None


@pytest.mark.parametrize(
    ("dtype", "factor", "is_written"),
    [(FP32, 0.9985, False), (BF16, 0.9, False), (BF16, 1.0, False), (BF16, 0.9985, True)],
)
@pytest.mark.parametrize("is_new", [False, True])
def test_one_that_moves_or_begins_anew_is_healthy(
    dtype: torch.dtype, factor: float, is_written: bool, is_new: bool
) -> None:
    state = torch.full((4,), 0.1, dtype=dtype)
    assert not decayed(state, factor, 4, is_written=is_written, is_new=is_new).findings


def test_a_16_bit_table_with_sparse_gradients_is_followed() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(16, 3)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with diagnose.trace(model) as t:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randint(0, 50, (8, 2))).float().square().sum().backward()
            optimizer.step()
    assert t.report.record.updates == 2
