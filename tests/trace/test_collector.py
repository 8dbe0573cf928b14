"""Where inf and NaN come from, and what they reach, op by op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo._torch import tree_leaves
from mezzo.trace.records import OUTSIDE, TraceRecord

QUICK_OPS = ("pow", "__rpow__", "cumsum", "sgn", "sparse.mm")


def ops_of_torch(*, quick: bool) -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db  # whose import takes seconds

    return [op for op in op_db if (op.name in QUICK_OPS) == quick]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.filterwarnings("ignore")  # the ops' own
def test_an_op_that_runs_runs_under_a_trace(quick: bool, dtype: torch.dtype) -> None:
    raised = []
    for op in ops_of_torch(quick=quick):
        wanted = op.supports_autograd and dtype.is_floating_point
        for sample in islice(given(op, dtype, wanted), 1):
            with suppress(Exception):  # torch has samples that it refuses
                differentiated(op, sample)
                try:
                    with diagnose.trace() as t:
                        differentiated(op, sample)
                    assert t.report.answer
                except Exception as error:
                    raised.append((op.name, repr(error)))
    assert raised == []


def given(op: Any, dtype: torch.dtype, wanted: bool) -> Iterator[Any]:
    return op.sample_inputs_func(op, "cpu", dtype, wanted) if dtype in op.supported_dtypes("cpu") else iter(())


def differentiated(op: Any, sample: Any) -> None:
    for given in tree_leaves((sample.input, sample.args, sample.kwargs)):
        if isinstance(given, Tensor):
            given.grad = None  # torch cannot add to a gradient of sgn's, nor to a sparse one in 16 bit
    out = op(sample.input, *sample.args, **sample.kwargs)
    losses = [
        t.float().sum()
        for t in (out if isinstance(out, (list, tuple)) else [out])
        if isinstance(t, Tensor) and t.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()


def seen(run: Callable[[], object]) -> TraceRecord:
    with diagnose.trace() as t:
        run()
    return t.report.record


BAD = torch.tensor([1.0, math.nan])


@pytest.mark.parametrize(
    ("run", "kinds"),
    [
        (lambda: torch.zeros(2).log(), ["source"]),
        (lambda: torch.full((2,), math.inf), ["constant"]),
        (lambda: BAD + 1, ["leaf"]),
        (lambda: torch.full((2,), math.inf) - torch.full((2,), math.inf), ["constant", "constant", "mixed"]),
        (lambda: torch.zeros(2).log().exp(), ["source"]),
        (lambda: torch.ones(2).log(), []),
    ],
    ids=["source", "constant", "leaf", "mixed", "inherited", "finite"],
)
def test_each_event_is_of_its_kind(run: Callable[[], object], kinds: list[str]) -> None:
    assert [e.kind for e in seen(run).events] == kinds


def test_values_keep_their_origin_through_views_and_copies() -> None:
    def run() -> None:
        x = nn.Parameter(torch.zeros(2, 3))
        kept = torch.zeros(4, 3)
        kept[1:3] = x.log().t().contiguous().t()
        (kept[2].sum() + x.sum()).backward()

    record = seen(run)
    first = record.events[0]
    assert (first.kind, first.site.op) == ("source", "log")
    assert first.index in {cause for s in record.sinks if s.kind == "loss" for cause in s.causes}


def test_what_is_written_over_is_forgotten() -> None:
    def run() -> None:
        x = nn.Parameter(torch.ones(2))
        scratch = torch.zeros(2).log()
        scratch.fill_(1.0)
        (x * scratch).sum().backward()

    record = seen(run)
    assert [e.site.op for e in record.events] == ["log"]
    assert record.sinks == ()


def test_a_gradient_is_reached_by_what_its_backward_made() -> None:
    weight = nn.Parameter(torch.zeros(2))
    record = seen(lambda: weight.sqrt().sum().backward())
    assert [(e.kind, e.site.phase, e.site.op) for e in record.events] == [("source", "backward", "sqrt")]
    assert [(s.kind, s.causes) for s in record.sinks] == [("gradient", frozenset({0}))]


def test_every_op_is_counted_and_no_value_changed() -> None:
    x = torch.randn(3, 3)
    results: list[Tensor] = []
    record = seen(lambda: results.append((x @ x + 1).relu()))
    assert torch.equal(results[0], (x @ x + 1).relu())
    assert record.ops == 3


def by_mask(z: Tensor) -> None:
    z[torch.tensor([False, True, False])] = -math.inf


def by_slice(z: Tensor) -> None:
    z[:, 1] = -math.inf


def by_whole_number_and_nan(z: Tensor) -> None:
    z[0] = 0
    z[1, 2] = math.nan


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("write", [by_mask, by_slice, by_whole_number_and_nan])
def test_a_number_that_is_assigned_at_an_index_is_named_where_it_is_written(
    write: Callable[[Tensor], None], inside: bool
) -> None:
    """torch makes it a tensor, which was said to be made outside the trace."""

    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            if inside:
                write(z)
            return z

    model = Writes(3, 3)
    with diagnose.trace(model) as t:
        z = model(torch.ones(3, 3))
        if not inside:
            write(z)
        (2 * z).sum().backward()
    found = t.report.findings[0]
    number = "nan" if write is by_whole_number_and_nan else "-inf"
    assert (found.verdict, found.called, found.path) == ("inherited", "setitem", "Writes" if inside else OUTSIDE)
    assert found.why.startswith(f"the code writes the number {number} here")
    assert found.frame is not None and found.frame.function == write.__name__
