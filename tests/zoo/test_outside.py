"""Training scripts of an outsider, who knew the documentation alone: the diagnosis says of each what was written down before it ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.zoo.case import MARK
from tests.zoo.lint_cases import LINTS
from tests.zoo.test_fixes import apply
from tests.zoo.test_zoo import FAULTY as PLANTED
from tests.zoo.test_zoo import PROGRAMS, ROWS, WELL, offers, pasted

import mezzo
from mezzo.diagnose import TraceReport
from mezzo.diagnose.doctor import trace_script
from mezzo.trace.findings import FAULTY_RULES
from mezzo.trace.ops import plain_name
from mezzo.trace.records import Frame, LintRule

FOLDER = Path(__file__).parent / "outside"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
REFUSED = {"c17_warmup_inverse": "a group of SGD has lr=inf: write a finite number."}
"""Those whose fault mezzo refuses by now before it is done; what was written down holds where the step is let pass."""
FAULTY = [name for name, e in EXPECTED.items() if e["kind"] == "faulty" and name not in REFUSED]
QUICK = {
    "a35_gcn_isolated",
    "b10_normalize_empty",
    "c24_token_count_bf16",
    "g01_fixed_scale",
    "g18_lr_schedule",
    "g19_resume_bad",
    "j07_gcn_isolated",
    "j11_nerf_far",
    "m14_bf16_counter",
    "m17_static_scale",
    "p01_zero_init_head",
}
"""Those that run in every suite."""
FIELDS = ("op", "module", "phase", "verdict")

__all__ = ["offers"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore")  # the scripts' own


def rows(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in names]


def diagnosis(name: str) -> TraceReport:
    torch.manual_seed(0)
    return trace_script(FOLDER / f"{name}.py").report


def complaints(name: str, report: TraceReport) -> list[str]:
    """What the first finding gets wrong; what the outsider left open (null) may be anything."""
    expected = EXPECTED[name]
    if expected["verdict"] in get_args(LintRule):
        found = next((x for x in report.record.lints if x.rule == expected["verdict"]), None)
        return ["no lint"] if found is None else _away(name, found.site.frame)
    if not report.findings:
        return ["no finding"]
    found = report.findings[0]
    readings = [expected, *({**expected, **other} for other in expected.get("or", []))]
    wrong = [
        [f"{f}: {getattr(found, f)} instead of {r[f]}" for f in FIELDS
         if r[f] is not None and getattr(found, f) != (plain_name(r[f]) if f == "op" else r[f])]
        for r in readings
    ]  # fmt: skip
    return min(wrong, key=len) + _away(name, found.frame)


def _away(name: str, frame: Frame | None) -> list[str]:
    marked = [n for n, text in enumerate((FOLDER / f"{name}.py").read_text().splitlines(), 1) if MARK in text]
    line = frame.line if frame else None
    return [f"line {line} instead of {marked}"] if marked and line not in marked else []


def test_the_documentation_counts_the_programs_of_the_zoo() -> None:
    sound = len(EXPECTED) - len(FAULTY) - len(REFUSED)
    text = " ".join((FOLDER.parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8").split())
    assert f"{len(PLANTED) + len(FAULTY)} faulty programs in {len(ROWS) + len(FAULTY)} runs" in text
    assert f"{len(LINTS)} lint cases" in text
    assert f"{len(PROGRAMS) + sound} healthy programs in {len(WELL) + sound} runs" in text


@pytest.mark.parametrize("name", rows(FAULTY))
def test_faulty(name: str, offers: list[tuple[str, Any]]) -> None:
    report = diagnosis(name)
    assert complaints(name, report) == []
    assert report.answer == "faulty" or EXPECTED[name]["verdict"] in set(get_args(LintRule)) - set(FAULTY_RULES)
    for text, operands in offers:
        assert all(bool(t.isfinite().all()) for t in pasted(text, operands)), text


@pytest.mark.parametrize("name", rows([*REFUSED]))
def test_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = diagnosis(name)
    assert (report.answer, report.findings) == ("not enough seen", ())
    said = " ".join(str(report).split())
    assert f"the program ended by itself with ConfigError('{REFUSED[name]}')" in said
    monkeypatch.setattr("mezzo.step.update.check_finite", lambda optimizer, group: None)
    report = diagnosis(name)
    assert complaints(name, report) == []
    assert report.answer == "faulty"


@pytest.mark.parametrize("name", rows([n for n in EXPECTED if n not in FAULTY and n not in REFUSED]))
def test_healthy(name: str) -> None:
    report = diagnosis(name)
    assert [f"{f.verdict} {f.op} {f.path} {f.frame} {f.why}" for f in report.findings] == []
    assert [f"{x.rule} {x.site.path} {x.site.frame}" for x in report.record.lints] == []
    assert report.answer == "healthy"


def precise() -> list[Any]:
    names = [n for n in FAULTY if EXPECTED[n]["verdict"] in ("overflow", "underflow")]
    return rows(names)


@pytest.mark.parametrize("name", precise())
def test_the_printed_edits_remove_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One edit after another, where layers that are alike fail one after another."""
    edits: list[str] = []
    report = diagnosis(name)
    prepare, is_prepared = mezzo.prepare, "mezzo.prepare" in (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    while found := [f for f in report.findings if f.verdict not in ("loss-scale", "lost-update", "exploding-step")]:
        fix = found[0].fix
        if not edits and not fix.edit:
            assert any(
                word in fix.advice for word in ("no rule", "no policy", "optimizer", "scale", "learning rate")
            ), fix
            return
        assert fix.edit and fix.edit not in edits, (edits, found[0].why, fix)
        edits.append(fix.edit)
        rules = ", ".join(edits)
        with monkeypatch.context() as patched:
            if is_prepared:
                patched.setattr(
                    mezzo,
                    "prepare",
                    lambda m, o, policy, rules=rules, **also: prepare(m, o, f"{policy}, {rules}", **also),
                )
            else:
                apply(patched, f"fp16, {rules}")
            report = diagnosis(name)
