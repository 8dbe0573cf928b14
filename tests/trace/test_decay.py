"""What a program multiplies by a factor near 1, again and again, in 16 bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport

BF16, FP32 = torch.bfloat16, torch.float32


def steps_of(model: nn.Linear, count: int) -> Iterator[None]:
    """Train a layer, and pause after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        yield


def decayed(state: Tensor, factor: float, steps: int, *, is_written: bool = False, is_new: bool = False) -> TraceReport:
    model = nn.Linear(4, 1)
    with diagnose.trace(model) as t:
        for _ in steps_of(model, steps):
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
    assert "half the spacing of bf16 there" in found.why


@pytest.mark.parametrize(
    ("dtype", "factor", "named"), [(BF16, 1 - 1e-3, ["weight, bias"]), (BF16, 0.9, []), (FP32, 1 - 1e-3, [])]
)
def test_weights_that_a_loop_decays_between_the_steps_of_an_optimizer_are_named(
    dtype: torch.dtype, factor: float, named: list[str]
) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16, dtype=dtype), torch.randn(64, 16, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with diagnose.trace(model) as t:
        for _ in range(6):
            optimizer.zero_grad()
            (model(x) - x).float().square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(factor)
    assert [f.why.partition(" for ")[2].partition(" are ")[0] for f in t.report.findings] == named


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


@pytest.mark.parametrize("numel", [4, 1])
def test_every_step_in_which_an_average_did_not_move_is_counted(numel: int) -> None:
    steps, model, averages = 40, nn.Linear(4, 1), [torch.ones(numel, dtype=BF16) for _ in range(2)]
    with diagnose.trace(model) as t:
        for _ in steps_of(model, steps):
            for average in averages:
                for _ in range(1 if numel > 1 else 70):
                    average.add_(1e-3)
    [found] = t.report.findings
    assert len(found.steps) >= steps - 1
    assert found.why.startswith(f"100% of the updates the program computed for a tensor of ({numel},) are smaller")


def test_a_16_bit_table_with_sparse_gradients_is_followed() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(16, 3)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with diagnose.trace(model) as t:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randint(0, 50, (8, 2))).float().square().sum().backward()
            optimizer.step()
    assert t.report.record.updates == 2


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_the_first_and_the_second_update_that_a_state_loses_are_told_of_one_tensor(shape: tuple[int, ...]) -> None:
    record = decayed(torch.full(shape, 0.1, dtype=BF16), 0.9985, 4).record
    assert [u.name for u in record.lost] == [f"a tensor of {shape}"] * 4
