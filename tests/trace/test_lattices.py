"""Chains of logsumexps, as of a CRF: what 16 bit makes of the gradient that comes back through all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport
from mezzo.trace import explain_lint

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LABELS = 6


class Crf(nn.Module):
    """A linear-chain CRF: the negative log-likelihood of a sequence of labels, its lattice in some format."""

    def __init__(self, dtype: torch.dtype, *, has_table: bool = False) -> None:
        super().__init__()
        self.emit = nn.Linear(8, LABELS)
        self.moves = nn.Parameter(0.3 * torch.randn(LABELS, LABELS))
        self.dtype, self.has_table = dtype, has_table

    def forward(self, x: Tensor) -> Tensor:
        scores, moves = self.emit(x).to(self.dtype), self.moves.to(self.dtype)
        table, total = torch.zeros_like(scores), scores[0]
        for t in range(1, len(scores)):
            total = torch.logsumexp(total[:, None] + moves, 0) + scores[t]
            if self.has_table:
                table[t] = total
        labels = torch.arange(len(x)) % LABELS
        gold = scores.float()[torch.arange(len(x)), labels].sum() + self.moves[labels[:-1], labels[1:]].sum()
        return (table[-1] if self.has_table else total).float().logsumexp(0) - gold


def gradient(model: Crf, x: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(model(x), [*model.parameters()])])


def sequence(length: int) -> Tensor:
    return torch.randn(length, 8, generator=torch.Generator().manual_seed(length))


def off(make: Callable[[torch.dtype], Crf], dtype: torch.dtype, x: Tensor) -> float:
    """How far the gradient is from that of fp32, as a share of its length."""
    found = []
    for one in (dtype, FP32):
        torch.manual_seed(0)
        found.append(gradient(make(one), x))
    return float((found[0] - found[1]).norm() / found[1].norm())


def traced(model: Crf, x: Tensor, steps: int = 1, rate: float = 0.0) -> TraceReport:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with diagnose.trace(model) as t:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    return t.report


def named(report: TraceReport) -> list[tuple[str, str]]:
    return [(x.case, x.site.op) for x in report.record.lints if x.rule == "amplified-rounding"]


@pytest.mark.parametrize(("dtype", "length"), [(FP16, 160), (BF16, 64)])
def test_a_long_lattice_is_named_though_each_of_its_calls_is_nearly_right(dtype: torch.dtype, length: int) -> None:
    x = sequence(length)
    assert off(Crf, dtype, x) > 1 / 8
    torch.manual_seed(0)
    report = traced(Crf(dtype), x)
    assert named(report) == [("weights", "logsumexp")], report
    [told] = [explain_lint(x).why for x in report.record.lints if x.rule == "amplified-rounding"]
    assert "what comes back through its calls is off by" in told


def test_a_lattice_that_is_written_into_a_table_is_followed_through_it() -> None:
    torch.manual_seed(0)
    assert named(traced(Crf(BF16, has_table=True), sequence(64))) == [("weights", "logsumexp")]


@pytest.mark.parametrize(("dtype", "length"), [(FP16, 32), (BF16, 4), (FP32, 64)])
def test_a_short_lattice_is_healthy(dtype: torch.dtype, length: int) -> None:
    x = sequence(length)
    assert off(Crf, dtype, x) < 1 / 16
    torch.manual_seed(0)
    assert named(traced(Crf(dtype), x)) == []


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_lattice_is_named_before_the_step_that_its_gradient_blew_up(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    report = traced(Crf(dtype), 3 * sequence(96), steps=2, rate=0.01)
    found = [(f.verdict, f.op, f.step) for f in report.faults]
    if dtype is FP32:
        assert found == []
    else:
        assert found[0] == ("amplified-rounding", "logsumexp", 0), report
        assert "exploding-step" in [verdict for verdict, *_ in found]
        assert "compute it in fp32" in report.faults[0].fix.advice


def test_the_lattice_is_named_before_the_gradient_that_it_made_overflow() -> None:
    """It was told as a value that does not fit fp32, where fp32 has a gradient of the usual size."""
    x = 3 * sequence(300)
    for dtype in (FP32, BF16):
        torch.manual_seed(0)
        model = Crf(dtype)
        with diagnose.trace(model) as t:
            model(x).backward()
        is_finite = all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        assert is_finite is (dtype is FP32)
    assert [f.verdict for f in t.report.faults][:2] == ["amplified-rounding", "overflow"], t.report
    assert "compute it in fp32" in t.report.faults[0].fix.advice
