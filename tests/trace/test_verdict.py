"""Verdicts follow from the numbers of an event alone."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tests.trace.events import event, facts, wide

import mezzo.diagnose as diagnose
from mezzo.formats import dtype_name, format_of
from mezzo.policy import Policy
from mezzo.trace.fix import fix_for
from mezzo.trace.verdict import verdict_of


@given(
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.floats(1.0, 2.0**20, allow_nan=False),
    st.integers(1, 24),
)
def test_the_named_loss_scale_is_the_largest_that_fits(dtype: torch.dtype, over: float, log_scale: int) -> None:
    limit, scale = format_of(dtype).max, 2.0**log_scale
    amax = limit * over
    verdict, why = verdict_of(
        event(
            phase="backward",
            loss_scale=scale,
            wide=(wide(amax),),
            outputs=(facts("result 0", dtype_name(dtype), posinf=1),),
        )
    )
    fits = [k for k in range(1, log_scale + 1) if amax / 2**k <= limit]
    assert verdict == ("loss-scale" if fits else "overflow")
    if fits:
        assert why.endswith(f"/ 2^{fits[0]}.")


def test_without_a_loss_scale_a_gradient_overflows() -> None:
    assert verdict_of(event(phase="backward", wide=(wide(1e6),)))[0] == "overflow"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"wide": (wide(7e4),)}, "overflow"),
        ({"wide": (), "kernel": "aten.log"}, "overflow"),  # of 16 bit, where no wider run can be had
        ({"wide": (wide(0, False), wide(1e50, True, "fp64"))}, "overflow"),
        ({"wide": (wide(0, False), wide(0, False, "fp64"))}, "overflow"),
        ({"wide": (wide(0, False), wide(0, False, "fp64")), "kernel": "aten.log"}, "singularity"),
        ({"wide": (wide(0, False, has_nan=True),), "outputs": (facts(nan=1),)}, "singularity"),
        ({"kind": "leaf", "leaf": "buffer x"}, "inherited"),
        ({"kind": "constant", "leaf": "inf"}, "inherited"),
        ({"kind": "mixed", "full_rows": 2}, "singularity"),
    ],
)
def test_verdicts(changes: dict[str, object], verdict: str) -> None:
    assert verdict_of(event(**changes))[0] == verdict


def test_the_edit_of_an_overflow_is_a_policy() -> None:
    found = fix_for("overflow", event(wide=(wide(7e4),)))
    assert found.edit == "module:body=fp32"
    assert str(Policy.parse(f"fp16, {found.edit}")) == "fp16, module:body=fp32"


def test_an_overflow_of_fp32_has_no_edit() -> None:
    found = fix_for(
        "overflow", event(wide=(wide(0, False), wide(1e50, True, "fp64")), outputs=(facts(dtype="fp32", posinf=1),))
    )
    assert found.edit == "" and found.advice.startswith("no policy repairs this")


def said(function: Callable[..., torch.Tensor], *values: float, dtype: torch.dtype) -> str:
    given = [torch.tensor([value, 1.0], dtype=dtype, requires_grad=True) for value in values]
    with diagnose.trace() as t:
        function(*given).sum().backward()
    return t.report.findings[0].why


@pytest.mark.parametrize(
    ("function", "values", "end"),
    [
        (torch.log, (0.0,), "log(self) at self=0."),
        (torch.div, (1.0, 0.0), "div(self, other) at self=1, other=0."),
        (torch.acos, (1.0,), "the derivative of acos(self) at self=1."),
        (torch.digamma, (0.0,), "digamma(self) at self=0."),
    ],
)
def test_values_are_told_with_the_op_whose_arguments_they_are(
    function: Callable[..., torch.Tensor], values: tuple[float, ...], end: str
) -> None:
    assert said(function, *values, dtype=torch.float32).endswith(f"either: {end}")


@pytest.mark.parametrize(
    ("function", "end"),
    [
        (lambda x: (x * x).log(), "log takes the logarithm of that 0."),
        (lambda x: 1 / (x * x), "reciprocal divides by that 0."),
        (lambda x: (x * x).rsqrt(), "rsqrt divides by that 0."),
        (lambda x: (x * x).sqrt(), "the derivative of sqrt divides by that 0."),
        (lambda x: (x * x).digamma(), "digamma has no value at that 0."),
        (lambda x: (0 * x + 1e-8).log(), "log takes the logarithm of exactly 0."),
    ],
)
def test_what_an_op_does_with_a_zero_is_said_of_that_op(function: Callable[..., torch.Tensor], end: str) -> None:
    assert said(function, 1e-5, dtype=torch.float16).endswith(end)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz])
def test_an_overflow_of_a_format_without_a_short_name_is_told(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(2, 2)
    with diagnose.trace(model) as t:
        (model(torch.ones(1, 2)).abs() + 1e6).to(dtype).float().sum().backward()
    finding = t.report.faults[0]
    assert (finding.verdict, finding.op) == ("overflow", "to")
    assert f"at most {torch.finfo(dtype).max:g}" in finding.why
