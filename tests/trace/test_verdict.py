"""Verdicts follow from the numbers of an event alone."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from mezzo.formats import dtype_name, format_of
from mezzo.policy import Policy
from mezzo.trace.findings import find
from mezzo.trace.fix import fix_for
from mezzo.trace.records import Event, Sink, Site, TensorFacts, TraceRecord, Wide
from mezzo.trace.verdict import verdict_of


def facts(name: str = "self", dtype: str = "fp16", amax: float = 1.0, **counts: int) -> TensorFacts:
    return TensorFacts(
        name=name, dtype=dtype, shape=(4,), device="cpu", amax=amax,
        **{"nan": 0, "posinf": 0, "neginf": 0, "zeros": 0, **counts},
    )  # fmt: skip


def event(**changes: object) -> Event:
    site = Site(
        phase="forward", root="Net", module="body", classes=("Net", "Linear"), user=None, library=None,
        called="linear", op="addmm", step=0, rank=0,
    )  # fmt: skip
    values: dict[str, object] = {
        "index": 0, "kind": "source", "kernel": "aten.addmm", "site": site, "inputs": (facts(),),
        "outputs": (facts("result 0", posinf=1),), "parents": frozenset(), "wide": (), "offending": (),
        "full_rows": 0, "loss_scale": 1.0, "flush": None, "leaf": "",
    }  # fmt: skip
    phase = changes.pop("phase", "forward")
    values["site"] = Site(**{f: getattr(site, f) for f in Site.__dataclass_fields__} | {"phase": phase})
    return Event(**{**values, **changes})


def wide(amax: float, is_finite: bool = True, dtype: str = "fp32", has_nan: bool = False) -> Wide:
    return Wide(dtype=dtype, is_finite=is_finite, amax=amax, has_nan=has_nan)


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


def record(events: list[Event], *sinks: Sink) -> TraceRecord:
    return TraceRecord(
        model="Net",
        events=tuple(events),
        sinks=sinks,
        sizes=(),
        lost=(),
        lints=(),
        lines=(),
        ops=1,
        steps=1,
        rank=0,
        torch="2",
    )


def sink(kind: str, *causes: int, step: int = 0) -> Sink:
    return Sink(kind=kind, name=kind, causes=frozenset(causes), step=step, after=1)


def test_what_reaches_nothing_is_no_fault() -> None:
    assert find(record([event(wide=(wide(7e4),))])) == ()


def test_a_mask_that_reaches_an_output_is_no_fault_but_a_loss_is() -> None:
    mask = event(kind="constant", leaf="-inf")
    assert find(record([mask], sink("output", 0))) == ()
    assert [f.verdict for f in find(record([mask], sink("loss", 0)))] == ["inherited"]


def test_the_root_is_named_and_not_its_consequences() -> None:
    source = event(wide=(wide(7e4),))
    mixed = event(index=1, kind="mixed", parents=frozenset({0}))
    [found] = find(record([source, mixed], sink("loss", 1), sink("gradient", 1)))
    assert (found.verdict, found.reached) == ("overflow", ("loss", "gradient gradient"))


def test_nan_made_from_a_mask_is_named_where_it_was_made() -> None:
    mask = event(kind="constant", leaf="-inf")
    leaf = event(index=1, kind="leaf", leaf="input [1] of Net", outputs=(facts(neginf=4),))
    mixed = event(index=2, kind="mixed", parents=frozenset({0, 1}), full_rows=1)
    [found] = find(record([mask, leaf, mixed], sink("loss", 2)))
    assert (found.verdict, found.op) == ("singularity", "addmm") and "1 row is -inf" in found.why


def test_a_leaf_that_holds_nan_is_named_itself() -> None:
    leaf = event(kind="leaf", leaf="input [1] of Net", outputs=(facts(nan=1),))
    mixed = event(index=1, kind="mixed", parents=frozenset({0}))
    assert [f.verdict for f in find(record([leaf, mixed], sink("loss", 1)))] == ["inherited"]


@pytest.mark.parametrize(("kind", "is_fault"), [("gradient", False), ("parameter", True), ("buffer", True)])
def test_a_loss_scale_that_only_reached_gradients_is_no_fault(kind: str, is_fault: bool) -> None:
    scaled = event(phase="backward", loss_scale=65536.0, wide=(wide(1e6),))
    [found] = find(record([scaled], sink(kind, 0)))
    assert (found.verdict, found.is_fault) == ("loss-scale", is_fault)
