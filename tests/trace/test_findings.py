"""Findings follow from a record alone: which event is the root cause, and whether it is a fault."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.trace.events import event, facts, record, sink, wide
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.trace.findings import find


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


def test_an_infinity_that_a_layer_reads_is_named_where_it_was_written() -> None:
    def forward(layer: nn.Module) -> Tensor:
        pooled = torch.full((4, 16), -math.inf).scatter_reduce(0, torch.zeros(1, 16).long(), torch.ones(1, 16), "amax")
        return layer(pooled)

    for layer in (nn.Linear(16, 4), nn.LayerNorm(16)):
        with diagnose.trace(layer) as t:
            forward(layer).sum().backward()
        first = t.report.findings[0]
        assert (first.op, first.verdict, first.module) == ("full", "inherited", "") and "-inf" in first.why
        assert "finite number" in first.fix.advice


def test_the_first_module_is_named_where_a_line_met_the_same_value_twice() -> None:
    first = event(where=(3,), offending=(("self", 0.0),))
    other = event(index=1, where=(2,), offending=(("self", 0.0),))
    again = event(index=2, where=(3,), offending=(("self", 0.0),))
    again, other = (replace(e, site=replace(e.site, module="later")) for e in (again, other))
    assert [f.module for f in find(record([first, other, again], sink("loss", 2)))] == ["body"]
    assert [f.module for f in find(record([first, other, again], sink("loss", 1)))] == ["later"]


def test_a_leaf_that_holds_nan_is_named_itself() -> None:
    leaf = event(kind="leaf", leaf="input [1] of Net", outputs=(facts(nan=1),))
    mixed = event(index=1, kind="mixed", parents=frozenset({0}))
    assert [f.verdict for f in find(record([leaf, mixed], sink("loss", 1)))] == ["inherited"]


@pytest.mark.parametrize(("kind", "is_fault"), [("gradient", False), ("parameter", True), ("buffer", True)])
def test_a_loss_scale_that_only_reached_gradients_is_no_fault(kind: str, is_fault: bool) -> None:
    scaled = event(phase="backward", loss_scale=65536.0, wide=(wide(1e6),))
    [found] = find(record([scaled], sink(kind, 0)))
    assert (found.verdict, found.is_fault) == ("loss-scale", is_fault)


@pytest.mark.parametrize(
    ("scales", "is_fault"), [((4.0, 4.0, 4.0), True), ((4.0, 2.0, 1.0), False), ((4.0, 4.0), False)]
)
def test_a_loss_scale_that_nobody_lowers_is_a_fault(scales: tuple[float, ...], is_fault: bool) -> None:
    events = [
        event(index=i, phase="backward", step=i, loss_scale=65536 * s, wide=(wide(1e6),)) for i, s in enumerate(scales)
    ]
    found = find(record(events, *(sink("gradient", i) for i in range(len(events)))))
    assert {f.verdict for f in found} == {"loss-scale"} and found[0].is_fault == is_fault


def test_a_loss_scale_stays_in_steps_that_are_skipped_for_their_loss() -> None:
    scaled = [event(index=i, phase="backward", step=i, loss_scale=65536.0, wide=(wide(1e6),)) for i in range(3)]
    overflow = [event(index=3 + i, step=i, wide=(wide(7e4),)) for i in range(3)]
    sinks = [sink(kind, i + 3 * (kind == "loss"), step=i) for i in range(3) for kind in ("gradient", "loss")]
    found = find(record([*scaled, *overflow], *sinks))
    assert [(f.verdict, f.is_fault) for f in found] == [("overflow", True), ("loss-scale", False)]


@pytest.mark.parametrize(("skipped", "steps", "is_told"), [(2, 4, False), (1, 4, True), (2, 2, True)])
def test_a_scaler_that_found_its_level_is_not_told(skipped: int, steps: int, is_told: bool) -> None:
    events = [event(index=i, phase="backward", step=i, loss_scale=2.0 ** (20 - i), wide=(wide(1e6),)) for i in range(2)]
    seen = record(events, *(sink("gradient", i, step=i) for i in range(2)))
    assert bool(find(replace(seen, skipped=skipped, steps=steps, updates=1))) == is_told
    # another optimizer's gradients, which it drops, are bad in a step that was taken
    assert not find(replace(seen, steps=2, updates=2, taken=frozenset((0, 1))))


def test_a_parametrisation_is_told_by_the_layer_that_has_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 1)))
    nn.init.zeros_(model[1].parametrizations.weight.original1)
    with diagnose.trace(model) as t:
        model(torch.ones(2, 4)).sum().backward()
    assert t.report.findings[0].module == "1"


def test_a_derivative_that_does_not_exist_is_told_by_the_argument_of_its_function() -> None:
    for function, argument in ((torch.acos, 1.0), (torch.asin, -1.0), (torch.sqrt, 0.0)):
        x = torch.tensor([0.3, argument], requires_grad=True)
        with diagnose.trace() as t:
            function(x).sum().backward()
        assert f"at self={argument:g}." in t.report.findings[0].why


def test_a_second_derivative_is_told_where_its_function_was_called() -> None:
    x = torch.tensor([0.3, 0.0], requires_grad=True)
    with diagnose.trace() as t:
        y = x.abs().pow(1.5)  # HERE
        slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        slope.sum().backward()
    found = t.report.findings[0]
    assert (found.op, found.phase) == ("pow", "backward") and found.frame is not None
    assert (
        found.frame.line == test_a_second_derivative_is_told_where_its_function_was_called.__code__.co_firstlineno + 3
    )


def test_a_number_that_becomes_1_as_a_tensor_of_16_bit_is_told_where_it_was_written() -> None:
    with diagnose.trace() as t:
        decay = torch.tensor(0.999, dtype=torch.bfloat16)
        w = torch.ones(2, requires_grad=True)
        (w / (1 - decay)).sum().backward()
    found = t.report.findings[0]
    line = test_a_number_that_becomes_1_as_a_tensor_of_16_bit_is_told_where_it_was_written.__code__.co_firstlineno + 2
    assert (found.verdict, found.op, found.fix.edit) == ("underflow", "div", "")
    assert f"tensor() rounds at {__file__}:{line}" in found.fix.advice
    with diagnose.trace() as t:
        (w / (1 - torch.tensor(1.0, dtype=torch.bfloat16))).sum().backward()
    assert t.report.findings[0].verdict == "singularity"


@pytest.mark.parametrize(("lr", "is_blown_up"), [(1e3, True), (1e-3, False)])
def test_a_step_that_blew_the_weights_up_comes_before_the_overflow_behind_it(lr: float, is_blown_up: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with diagnose.trace(model) as t:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(torch.randn(8, 16)).float() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if loss.isfinite():
                optimizer.step()
    assert [f.verdict for f in t.report.faults][:2] == (["exploding-step", "overflow"] if is_blown_up else [])


def test_what_fails_behind_weights_that_went_bad_is_no_finding_of_its_own() -> None:
    """It was judged by what the bad weights gave: sqrt "not finite in fp64 either" at nan."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 16), torch.randn(64, 8) * 0.05 + 4
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with diagnose.trace(model) as t:
        for _ in range(6):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = model(x)
                spread = (h * h).mean(0) - h.mean(0) ** 2
                loss = ((h - h.mean(0)) / (spread + 1e-6).sqrt()).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [(f.verdict, f.op, f.step) for f in t.report.findings] == [("underflow", "sqrt", 0)]
