"""A report says healthy only of what was looked at."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trace.events import event, record, sink, wide

import mezzo.diagnose as diagnose
from mezzo.report import Chart
from mezzo.trace import explain_lint
from mezzo.trace.findings import find
from mezzo.trace.records import LineRange, Size, TraceRecord
from mezzo.trace.trace_report import TraceReport

SEEN = replace(record([]), forwards=2, backwards=2, updates=2, ops=90)
OVERFLOW = replace(record([event(wide=(wide(7e4),))], sink("loss", 0)), forwards=1, backwards=1)

SCALED = event(phase="backward", loss_scale=65536.0, wide=(wide(1e6),))
TOO_HIGH = replace(record([SCALED], sink("gradient", 0)), forwards=1, backwards=1)


def report(seen: TraceRecord) -> TraceReport:
    return TraceReport(record=seen, findings=find(seen))


@pytest.mark.parametrize(
    ("seen", "answer", "why"),
    [
        (SEEN, "healthy", ""),
        (replace(SEEN, inferences=3, forwards=0, backwards=0), "healthy", ""),
        (replace(SEEN, ops=0), "not enough seen", "no op of torch ran"),
        (replace(SEEN, backwards=0), "not enough seen", "nothing went backward"),
        (replace(SEEN, ended="KeyError: 'x'"), "not enough seen", "KeyError"),
        (replace(SEEN, updates=0, skipped=3), "not enough seen", "left out every step (3)"),
        (replace(TOO_HIGH, updates=0), "not enough seen", "left out every step (1)"),
        (replace(TOO_HIGH, updates=1), "healthy", ""),
        (replace(SEEN, updates=1, skipped=21), "healthy", ""),
        (OVERFLOW, "faulty", ""),
        (replace(OVERFLOW, ended="RuntimeError"), "faulty", "RuntimeError"),
    ],
)
def test_the_answer_follows_from_what_was_seen(seen: TraceRecord, answer: str, why: str) -> None:
    found = report(seen)
    assert (found.answer, found.is_healthy, found.document().is_good) == (
        answer,
        answer == "healthy",
        answer == "healthy",
    )
    assert why in found.unseen and bool(why) == bool(found.unseen)


def test_what_was_seen_is_counted_in_words() -> None:
    assert report(SEEN).seen == "2 forwards, 2 backwards, 2 updates; 90 ops"
    assert report(replace(SEEN, forwards=3, skipped=1, ops=1234)).seen == (
        "3 forwards, 2 backwards, 2 updates, 1 step left out by the loss scaler; 1,234 ops"
    )


def test_the_first_fault_leads_the_page() -> None:
    text = str(report(OVERFLOW))
    assert "Faulty: overflow in addmm, forward, module body" in text
    assert "module:body=fp32" in text


def test_sizes_and_lines_are_drawn_for_the_step_of_the_fault() -> None:
    sizes = [
        Size(kind="output", root="Net", name=f"layers.{n}", cls="Linear", dtype="fp16", rms=2.0**n, amax=4.0**n,
             nonfinite=0, step=step, call=0)
        for step in (0, 1) for n in (1, 2, 3)
    ]  # fmt: skip
    line = LineRange(
        file=__file__, line=8, phase="forward", dtypes=("fp16",), lowest=-3, highest=4, middle=(-1, 2), zeros=0.0,
        ops=("addmm",),
    )  # fmt: skip
    details = report(replace(OVERFLOW, sizes=tuple(sizes), lines=(line,))).document().details
    [chart] = [block for block in details if type(block).__name__ == "Chart"]
    assert chart.labels == ("layers.1", "layers.2", "layers.3")
    assert [series.values for series in chart.series] == [(1.0, 2.0, 3.0), (2.0, 4.0, 6.0)]
    [source] = [block for block in details if type(block).__name__ == "Source"]
    assert source.lines[0][2] == "fwd fp16 2^-3…2^4, most 2^-1…2^2"


@pytest.mark.parametrize("kind", ["output", "gradient"])
def test_a_deep_model_is_drawn_from_its_first_layer_to_its_last(kind: str) -> None:
    sizes = [
        Size(kind=kind, root="Net", name=f"layers.{n}", cls="Linear", dtype="fp16", rms=2.0**n, amax=2.0**n,
             nonfinite=0, step=0, call=0)
        for n in range(120)
    ]  # fmt: skip
    details = report(replace(OVERFLOW, sizes=tuple(sizes))).document().details
    [chart] = [block for block in details if isinstance(block, Chart)]
    assert {chart.labels[0], chart.labels[-1]} == {"layers.0", "layers.119"} and len(set(chart.labels)) == 64
    assert chart.title.endswith(" (64 of 120)")


def test_a_broken_rule_is_told_with_what_to_write_instead(tmp_path: Path) -> None:
    with diagnose.trace() as t:
        torch.ones(2, dtype=torch.float16) + 1e-9
    [lint] = t.record.lints
    told = explain_lint(lint)
    t.report.to_html(str(tmp_path / "page.html"))
    page = html.unescape((tmp_path / "page.html").read_text(encoding="utf-8"))
    for said in (str(t.report), t.report.to_text(), page):
        assert f"{told.why} Instead: {told.advice}" in " ".join(said.split())


@pytest.mark.parametrize(("look", "said"), [(diagnose.trace, r"trace of \d+ ops in 2"), (diagnose.watch, "watch of 2")])
def test_what_looks_says_what_it_has_seen_and_where_it_says_what_it_found(look: Any, said: str) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with look(model) as looking:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert re.fullmatch(rf"<{said} steps: its \.report says what it found>", repr(looking))
