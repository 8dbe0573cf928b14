"""Verdicts follow from the numbers of an event alone."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tests.trace.events import event, facts, wide

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
