"""An error is blamed on the op that made it, once, and on no other."""

from __future__ import annotations

import pytest
import torch
from tests.trace.test_amplified import FP32, Losses, low, named, traced
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.trace import explain_lint


def gathered(m: nn.Linear, x: Tensor) -> Tensor:
    d = low(torch.tensor([1.0, 1e3]).repeat(4)) * (100 + low(m(x)).sigmoid() * 1e-2) - 100
    return (d.gather(1, torch.zeros(64, 1).long()).float() * 100 - 1).square().mean()


def seen_by_a_view(m: nn.Linear, x: Tensor) -> Tensor:
    z = low(m(x)) * 1e-2 + 1
    near = (z[:, None] * z[None]).mean(-1) + 1e3 * low(torch.ones(64, 64) - torch.eye(64)) - 1
    return ((near.diagonal() + 0.0).float() * 1e2).square().mean()


def behind_a_reciprocal(m: nn.Linear, x: Tensor) -> Tensor:
    count = low(torch.zeros(2)).index_add(0, torch.arange(3000) // 2990, low(torch.ones(3000)))
    return ((1 / count)[torch.zeros(64).long(), None] * low(m(x)).square()).float().mean() * 1e4


@pytest.mark.parametrize(("loss_of", "op", "by"), [(gathered, "sub", "gather"), (seen_by_a_view, "sub", "add")])
def test_an_op_that_only_shows_an_error_is_not_blamed_for_it(loss_of: Losses, op: str, by: str) -> None:
    [lint] = traced(loss_of).record.lints
    assert (lint.rule, lint.site.op) == ("amplified-rounding", op)
    assert f" off what fp32 has where {by} reads it, of numbers" in explain_lint(lint).why
    assert named(traced(loss_of, FP32)) == []


def test_what_follows_an_overflow_is_no_rounding() -> None:
    def norm_by_hand(m: nn.Linear, x: Tensor) -> Tensor:
        h = (m(x) * 500).half()
        return (h * torch.rsqrt((h * h).sum(-1, keepdim=True) + 1e-5) - x).float().square().mean()

    report = traced(norm_by_hand, FP32)
    assert (report.findings[0].verdict, named(report)) == ("overflow", [])


def test_a_sum_that_is_named_is_named_once() -> None:
    assert [(x.rule, x.site.op) for x in traced(behind_a_reciprocal).record.lints] == [
        ("half-accumulator", "index_add")
    ]


@pytest.mark.parametrize("is_flushed", [True, False])
def test_a_zero_that_16_bit_made_is_underflow_though_its_gradient_overflowed_before(is_flushed: bool) -> None:
    """A root of flushed squares, under a loss whose gradient fp16 does not hold either."""
    torch.manual_seed(0)
    x = ((torch.rand(8, 4) + 1) * (1e-5 if is_flushed else 0)).requires_grad_()
    with diagnose.trace(None) as t:
        norm = x.half().square().sum(1).sqrt()
        (norm.float() * 1e6 - 1).square().mean().mul(1024.0).backward()
    found = next(f for f in t.report.findings if f.op == "sqrt")
    assert (found.verdict, found.phase) == ("underflow" if is_flushed else "singularity", "backward")


def test_squares_that_overflowed_reach_no_number() -> None:
    with torch.no_grad(), diagnose.trace(None) as t:
        torch.tensor([300.0]).half().square()
    [lint] = t.report.record.lints
    assert explain_lint(lint).why == "squares reach more than the 65504 that fp16 holds."
