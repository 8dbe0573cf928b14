"""Histograms of exponents count what a cast would do, and lines of source show what was computed there."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from tests.trace.events import event
from torch import Tensor

from mezzo.formats import FORMATS
from mezzo.trace.exponents import BIAS, BINS, Histogram, LineWatch, largest_scale
from mezzo.trace.lint_rules import LintWatch
from mezzo.trace.records import Frame, Site
from mezzo.trace.reference_path import ReferencePath


def histogram(values: Tensor) -> Histogram:
    """Count by frexp, another way than the watch does."""
    counts = [0] * BINS
    for x in values.double().flatten().tolist():
        if not math.isfinite(x):
            counts[BINS - 1] += 1
        elif abs(x) < 2.0**-126:
            counts[0] += 1
        else:
            counts[math.frexp(x)[1] - 1 + BIAS] += 1
    return Histogram(counts=tuple(counts))


@given(
    st.sampled_from(["fp16", "bf16", "e4m3", "e5m2"]),
    st.lists(
        st.floats(1.0, 1.99).flatmap(lambda m: st.integers(-60, 40).map(lambda e: m * 2.0**e)), min_size=1, max_size=40
    ),
)
@example("fp16", [65504.0, 2.0**15, 2.0**16, 2.0**-25, 2.0**-24])
def test_shares_are_those_of_a_real_cast(name: str, values: list[float]) -> None:
    fmt, x = FORMATS[name], torch.tensor(values, dtype=torch.float64)
    x = x[x != fmt.smallest / 2]
    binade_of_max = 2.0 ** math.floor(math.log2(fmt.max))
    flushed = (x.to(fmt.dtype).double() == 0) if name in ("fp16", "bf16") else x < fmt.smallest / 2
    h = histogram(x)
    assert h.flushed(fmt) * max(1, h.numbers) == pytest.approx(float(flushed.sum()))
    assert h.saturated(fmt) * max(1, h.numbers) == pytest.approx(float((x >= 2 * binade_of_max).sum()))


def test_the_largest_scale_keeps_the_largest_gradient_inside() -> None:
    gradients = torch.tensor([1e-7, 3e-5, 2e-3])
    scale = 2 * largest_scale(histogram(gradients), FORMATS["fp16"])
    assert float((gradients * scale).half().max()) < math.inf
    assert float((gradients * scale * 2).max()) >= 2.0**15


def test_a_line_shows_the_exponents_of_all_its_results() -> None:
    plain, frame = event().site, Frame(file="model.py", line=7, function="forward")
    site = Site(**{name: getattr(plain, name) for name in Site.__dataclass_fields__} | {"user": frame})
    watch = LineWatch(LintWatch(ReferencePath()))
    watch.see(plain, [torch.ones(1)], [1.0])  # of no line
    watch.see(site, [torch.tensor([0.0, 0.5, 3.0]), torch.tensor([2.0**-9]).half()], [3.0, 2.0**-9])
    watch.see(site, [torch.tensor([1.0, math.inf])], [1.0])
    [line] = watch.records()
    assert (line.file, line.line, line.phase, line.dtypes, line.ops) == (
        "model.py",
        7,
        "forward",
        ("fp16", "fp32"),
        ("addmm",),
    )
    assert (line.lowest, line.highest, line.middle) == (-9, 1, (-9, 1))
    assert line.zeros == pytest.approx(1 / 6)
