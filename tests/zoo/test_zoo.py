"""The diagnosis names op, module, line and kind of every planted fault, and nothing in healthy programs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tests.zoo import (
    domain_healthy,
    domain_losses,
    domain_means,
    domain_mechanics,
    domain_models,
    domain_scripts,
    domain_sound,
    faulty_arguments,
    faulty_backward,
    faulty_forward,
    faulty_state,
    healthy,
    lint_cases,
    practice_faulty,
    practice_scripts,
    practice_sound,
    public_faulty,
    public_healthy,
    public_loops,
    recipe_control,
    recipe_generative,
    recipe_habits,
    recipe_loops,
    recipe_science,
    recipe_signals,
    recipe_sound,
    recipe_well,
    scripts,
    stranger_healthy,
    stranger_loops,
    stranger_losses,
    stranger_models,
    stranger_sound,
    stranger_steps,
    strangers,
)
from tests.zoo.case import Case
from tests.zoo.lint_cases import LintCase

import mezzo.diagnose as diagnose
from mezzo.trace import Trace, collector, explain_lint
from mezzo.trace.records import LintRule

STRANGERS = (
    stranger_healthy, stranger_losses, stranger_loops, stranger_models, stranger_sound, stranger_steps,
    domain_healthy, domain_losses, domain_means, domain_mechanics, domain_models, domain_scripts, domain_sound,
    recipe_control, recipe_generative, recipe_habits, recipe_loops, recipe_science, recipe_signals, recipe_sound, recipe_well,
    practice_faulty, practice_scripts, practice_sound,
)  # fmt: skip
"""Loaded for the programs that they put into `strangers`."""
QUICK = {
    recipe_control.positions_beyond_the_half_range, recipe_generative.signal_to_noise_of_a_halved_schedule,
    recipe_loops.loss_made_finite_by_force, recipe_loops.schedule_that_divides_zero_by_zero,
    recipe_signals.class_that_was_never_seen, recipe_signals.transducer_lattice_by_hand,
    practice_scripts.positions_of_a_single_token, practice_scripts.exponential_gate_without_a_stabiliser,
    practice_sound.exponential_gate_with_a_stabiliser,
    recipe_science.transport_plan_by_plain_kernels, recipe_control.importance_weights_of_a_whole_trajectory, recipe_well.attention_over_segments,
}  # fmt: skip
"""Of the last two batches those that run in every suite."""
LARGE = (healthy.vision_transformer, healthy.causal_language_model, healthy.bert, healthy.gpt2)
"""Healthy models that are quick in one dtype only."""
PUBLIC = [*public_faulty.CASES, *public_loops.CASES, *strangers.CASES]
FAULTY = [
    *faulty_forward.CASES, *faulty_arguments.CASES, *faulty_backward.CASES, *faulty_state.CASES, *scripts.CASES, *PUBLIC,
]  # fmt: skip
ROWS = [(case, dtype) for case in FAULTY for dtype in case.dtypes]
LINTS = [(lint, dtype) for lint in lint_cases.LINTS for dtype in lint.dtypes]
PROGRAMS = [*healthy.HEALTHY, *scripts.HEALTHY, *public_healthy.HEALTHY, *strangers.HEALTHY]
TURNS = (torch.bfloat16, torch.float32)
"""Which of the programs that run in each dtype leave to the slow tests, by turns."""
WELL = [(b, dtype) for b in PROGRAMS for dtype in strangers.HEALTHY.get(b, healthy.dtypes_of(b))]

pytestmark = [
    # the faulty programs themselves are warned about; the diagnosis adds none
    pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom"),
    pytest.mark.filterwarnings("ignore:var\\(\\). degrees of freedom"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace.? is deprecated"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def diagnosis(build, dtype: torch.dtype, *, of_risks: bool = False) -> diagnose.TraceReport:
    torch.manual_seed(0)
    run = build(dtype)
    with suppress(Exception, SystemExit), Trace(None, of_risks=of_risks) as t:
        run()
    return t.report


def complaints(case: Case, report: diagnose.TraceReport) -> list[str]:
    """What the first finding of a report gets wrong about a case."""
    if not report.findings:
        return ["no finding"]
    found = report.findings[0]
    said = f"{found.why} {found.fix.advice} {found.fix.edit}"
    pairs = [
        ("op", found.op, case.op),
        ("module", found.module, case.module),
        ("verdict", found.verdict, case.verdict),
        ("phase", found.phase, case.phase),
        ("line", None if found.frame is None else (found.frame.file, found.frame.line), case.line),
    ]
    wrong = [f"{what}: {got} instead of {want}" for what, got, want in pairs if got != want]
    return wrong + [f"{word!r} is not in {said!r}" for word in case.names if word not in said]


def is_large(build) -> bool:
    """Whether a program trains a model of the transformers library, of which one runs in every suite."""
    return "transformers" in build.__code__.co_names and build is not stranger_models.gpt2_with_a_corrupt_row


def is_slow(build) -> bool:
    """Whether a program is left to the slow tests in each dtype."""
    return is_large(build) or (
        build.__module__.startswith(("tests.zoo.recipe_", "tests.zoo.practice_")) and build not in QUICK
    )


def row(case: Case, dtype: torch.dtype) -> object:
    """Run public scripts in one dtype; the others are slow twins."""
    is_twin = case in PUBLIC and (dtype is not case.dtypes[0] or is_slow(case.build))
    return pytest.param(case, dtype, marks=[pytest.mark.slow] * is_twin, id=f"{case.name}-{name(dtype)}")


def healthy_row(build, dtype: torch.dtype) -> object:
    is_public = build in public_healthy.HEALTHY or build in strangers.HEALTHY or build in LARGE
    is_twin = is_public and (dtype is not strangers.HEALTHY.get(build, (torch.float16,))[0] or is_slow(build))
    is_twin |= not is_public and dtype is TURNS[PROGRAMS.index(build) % 2]
    return pytest.param(build, dtype, marks=[pytest.mark.slow] * is_twin, id=f"{build.__name__}-{name(dtype)}")


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Replacements that a diagnosis prints, with what the op was given."""
    found: list[tuple[str, Any]] = []
    offer = collector.replacement_for

    def noted(op: str, operands: Any) -> str:
        text = offer(op, operands)
        if text:
            # a copy: a step may write what the op was given
            kept = [t.detach().clone().requires_grad_(t.requires_grad) for t in operands.tensors]
            found.append((text, replace(operands, tensors=kept)))
        return text

    monkeypatch.setattr(collector, "replacement_for", noted)
    return found


def pasted(text: str, operands: Any) -> list[torch.Tensor]:
    """Evaluate an expression as a reader would paste it. Returns: its value, and its gradients."""
    leaves = operands.tensors
    names = dict(zip("xy", leaves, strict=False)) | ({"p": leaves[1]} if len(leaves) > 1 else {})
    value = eval(text, {**vars(torch), "torch": torch, **names})
    wanted = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(value.float().sum(), wanted, allow_unused=True) if wanted else ()
    return [value, *(g for g in grads if g is not None)]


@pytest.mark.parametrize(("case", "dtype"), [row(*pair) for pair in ROWS])
def test_faulty(case: Case, dtype: torch.dtype, offers: list[tuple[str, Any]]) -> None:
    report = diagnosis(case.build, dtype)
    assert complaints(case, report) == []
    fix = report.findings[0].fix
    if fix.tried and report.findings[0].verdict == "singularity":
        assert any(text in fix.advice for text, _ in offers)
    for text, operands in offers:
        assert all(bool(t.isfinite().all()) for t in pasted(text, operands)), text


@pytest.mark.parametrize(("build", "dtype"), [healthy_row(*pair) for pair in WELL])
def test_healthy(build, dtype: torch.dtype) -> None:
    report = diagnosis(build, dtype)
    assert [f"{f.verdict} {f.op} {f.path} {f.frame} {f.why}" for f in report.findings] == []
    assert [f"{x.rule} {x.site.path} {x.site.frame}" for x in report.record.lints] == []
    assert report.answer == "healthy"


@pytest.mark.parametrize(("case", "dtype"), LINTS, ids=[f"{c.name}-{name(d)}" for c, d in LINTS])
def test_lint(case: LintCase, dtype: torch.dtype) -> None:
    found = diagnosis(case.build, dtype, of_risks=True).record.lints
    places = [(x.rule, x.site.module, (x.site.frame.file, x.site.frame.line)) for x in found if x.site.frame]
    assert places == [(case.verdict, case.module, case.line)]
    why = explain_lint(found[0]).why
    assert [word for word in case.names if word not in why] == []


def test_every_rule_has_a_habit() -> None:
    assert {h.verdict for h in lint_cases.LINTS} == set(get_args(LintRule))


def test_the_zoo_is_large_enough() -> None:
    assert len({c.name for c in FAULTY}) == len(FAULTY) >= 100
    assert len(scripts.CASES) + len(PUBLIC) >= 40 <= len(scripts.HEALTHY) + len(public_healthy.HEALTHY)
    assert {c.verdict for c in FAULTY} == {
        "overflow", "underflow", "singularity", "loss-scale", "inherited", "exploding", "vanishing", "lost-update",
    }  # fmt: skip


@pytest.mark.parametrize("field", ["op", "module", "verdict", "phase"])
def test_a_wrong_expectation_is_seen(field: str) -> None:
    case = replace(FAULTY[0], **{field: "something else"})
    assert [c.split(":")[0] for c in complaints(case, diagnosis(case.build, torch.float16))] == [field]


def test_a_healthy_run_of_a_faulty_program_is_seen() -> None:
    case = next(c for c in FAULTY if c.name == "feed_forward")
    assert complaints(case, diagnosis(case.build, torch.float32)) == ["no finding"]
