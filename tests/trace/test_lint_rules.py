"""Each rule at its edge: what just loses numbers is named, what just does not is not."""

from __future__ import annotations

import contextlib
import linecache
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from tests.pairwise import pairwise
from torch import Tensor

import mezzo
import mezzo.diagnose as diagnose
from mezzo.formats import format_of
from mezzo.trace import Trace, explain_lint
from mezzo.trace.lint_rules import LintWatch
from mezzo.trace.lint_warning import TEXTS
from mezzo.trace.records import Lint, LintCase, LintRule, Site
from mezzo.trace.reference_path import ReferencePath

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SITE = Site(
    phase="forward", root="", module="", classes=(), user=None, library=None, called="", op="mul", step=0, rank=0
)
TINY = format_of(FP16).smallest


def counted(times: int, dtype: torch.dtype) -> Tensor:
    total = torch.zeros((), dtype=dtype)
    for _ in range(times):
        total.add_(1.0)
    return total


EDGES: list[tuple[str, Callable[[], Tensor], Callable[[], Tensor]]] = [
    (
        "integers-in-16-bit",
        lambda: torch.arange(2049, 2052).float().half(),
        lambda: torch.arange(2040, 2049).float().half(),
    ),
    ("integers-in-16-bit", lambda: torch.arange(258, dtype=BF16), lambda: torch.arange(257, dtype=BF16)),
    ("integers-in-16-bit", lambda: torch.tensor([257]).to(BF16), lambda: torch.tensor([256, 258]).to(BF16)),
    (
        "integers-in-16-bit",
        lambda: torch.tensor([-301, -303]).to(BF16),
        lambda: torch.tensor([0, -10001, -10001]).to(BF16),
    ),
    (
        "squares-near-overflow",
        lambda: torch.tensor([150.0, 2.0]).half() ** 2,
        lambda: 2.0 ** torch.arange(4, dtype=FP16),
    ),
    ("ids-in-16-bit", lambda: torch.tensor([257]).to(BF16).long(), lambda: torch.tensor([256]).to(BF16).long()),
    (
        "ids-in-16-bit",
        lambda: torch.tensor([[2049.0, 0.3]]).half()[:, 0].float().int(),
        lambda: torch.tensor([[2048.0, 0.3]]).half()[:, 0].float().int(),
    ),
    # a bin that was computed in 16 bit is no id that came in, and what is not 0 stays it
    (
        "ids-in-16-bit",
        lambda: torch.tensor([2049, 5]).half().short(),
        lambda: (torch.rand(9).half() * 1e4).floor().long(),
    ),
    ("integers-in-16-bit", lambda: torch.tensor([2049]).half().bool(), lambda: torch.tensor([2050]).half().bool()),
    ("integers-in-16-bit", lambda: torch.tensor([2049.0]).half(), lambda: torch.tensor([2049.5]).half()),
    (
        "integers-in-16-bit",
        lambda: torch.ones(258, dtype=BF16).cumsum(0),
        lambda: torch.ones(256, dtype=BF16).cumsum(0),
    ),
    (
        "integers-in-16-bit",
        lambda: torch.ones(258, dtype=torch.bool).cumsum(0, dtype=BF16),
        lambda: torch.full((9,), 130.0, dtype=BF16).cumsum(0),
    ),
    ("constant-lost", lambda: torch.ones(2, dtype=FP16) + TINY / 2, lambda: torch.ones(2, dtype=FP16) + TINY),
    ("constant-lost", lambda: torch.ones(2, dtype=FP16) * 65536.0, lambda: torch.ones(2, dtype=FP16) / 65536.0),
    ("constant-lost", lambda: torch.ones(2, dtype=FP16) + -1e9, lambda: torch.ones(2, dtype=BF16) + -1e9),
    ("constant-lost", lambda: torch.ones(2, dtype=FP16) + 1e9, lambda: torch.ones(2, dtype=FP16) + -math.inf),
    (
        "squares-near-overflow",
        lambda: torch.full((2,), 129.0, dtype=FP16).square(),
        lambda: torch.full((2,), 127.0, dtype=FP16).square(),
    ),
    ("half-accumulator", lambda: counted(288, BF16), lambda: counted(256, BF16)),
    ("half-accumulator", lambda: counted(288, BF16), lambda: counted(288, FP32)),
]


def rules(run: Callable[[], Tensor]) -> list[str]:
    with diagnose.trace() as t:
        run()
    return [lint.rule for lint in t.record.lints]


@pytest.mark.parametrize(("rule", "loses", "keeps"), EDGES)
def test_a_rule_fires_at_its_edge_and_not_before(
    rule: str, loses: Callable[[], Tensor], keeps: Callable[[], Tensor]
) -> None:
    assert rules(loses) == [rule]
    assert rules(keeps) == []


def test_a_line_is_noted_once_a_rule_and_a_rule_a_bounded_number_of_times() -> None:
    watch = LintWatch(ReferencePath())
    for _ in range(3):
        watch.add("constant-lost", SITE, FP16, "0", 1e-9, "aten.add")
    assert len(watch.records()) == 1
    for i in range(200):
        watch.add("constant-lost", SITE, FP16, "0", 1e-9, f"aten.op{i}")
    assert len(watch.records()) == 64


@pytest.mark.parametrize(("rule", "case"), TEXTS)
def test_every_rule_says_what_it_costs_and_what_to_write(rule: LintRule, case: LintCase) -> None:
    said = explain_lint(Lint(rule=rule, site=SITE, kernel="", dtype="fp16", what="2 rows", value=3e4, case=case))
    assert said.why.endswith((".", ").")) and said.advice.endswith(".")


def test_every_rule_and_every_case_has_its_words() -> None:
    assert {rule for rule, _ in TEXTS} == set(get_args(LintRule))
    assert {case for _, case in TEXTS} == set(get_args(LintCase))


def test_a_weight_in_16_bit_is_named_only_inside_a_region() -> None:
    model = torch.nn.Linear(2, 2).to(BF16)
    watch = LintWatch(ReferencePath())
    watch.model(model, SITE, in_region=False)
    assert watch.records() == ()
    watch.model(model, SITE, in_region=True)
    assert [(x.rule, x.value) for x in watch.records()] == [("half-weights-in-region", 2.0)]


def test_what_was_not_lost_is_told_by_lint_alone() -> None:
    """A loss in 16 bit, a backward inside the region, fp16 gradients that no scale was needed for: a run that is sound."""

    def run() -> None:
        model = torch.nn.Linear(4, 4)
        with torch.autocast("cpu", dtype=FP16):
            model(torch.ones(2, 4)).mean().backward()

    told: dict[bool, list[str]] = {}
    for of_risks in (False, True):
        with Trace(None, of_risks=of_risks) as t:
            run()
        told[of_risks] = [x.rule for x in t.record.lints]
    assert told == {False: [], True: ["backward-in-region", "loss-in-16-bit", "no-loss-scale"]}


@pytest.mark.parametrize("largest", [3000, 3300])
def test_ids_that_come_back_as_others_are_a_fault_whether_they_are_still_in_range(largest: int) -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(largest, 4)
    with diagnose.trace() as t, contextlib.suppress(IndexError):
        ids = torch.arange(2990, 3000).to(BF16)  # FAULT
        table(ids.long()).square().sum().backward()
    (found,) = t.report.findings
    assert t.report.answer == "faulty" and (found.verdict, found.op) == ("ids-in-16-bit", "to")
    assert "2990 came back as 2992" in found.why
    assert found.frame is not None and "# FAULT" in linecache.getline(found.frame.file, found.frame.line)


def test_an_unscaled_loss_is_told_where_a_gradient_was_flushed() -> None:
    model = torch.nn.Linear(64, 1, bias=False)
    x = torch.ones(1, 64)
    x[0, 0] = 1e-4
    with diagnose.trace() as t:
        with torch.autocast("cpu", dtype=FP16):
            y = model(x)
        (y.float() * 1e-5).sum().backward()
    assert [x.rule for x in t.record.lints] == ["no-loss-scale"] and t.report.answer == "healthy"


def added_up(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[0])
    for row in x:
        total = total + row
    return total


def added_up_in_place(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[0])
    for row in x:
        total += row
    return total


def added_up_by_python(x: Tensor) -> Tensor:
    return sum(row for row in x)  # type: ignore[return-value]


def taken_off(x: Tensor) -> Tensor:
    total = x[0]
    for row in x[1:]:
        total = total - row
    return total


def emptied_again_and_again(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[0])
    for i, row in enumerate(x):
        total += row
        if i % 100 == 0:
            total.zero_()
    return total


SUMS = [added_up, added_up_in_place, added_up_by_python, taken_off]


@pairwise(total=SUMS, grad=[False, True], shape=[(400, 4), (400, 1), (400,)])
def test_a_sum_that_a_loop_adds_up_in_16_bit_is_named_where_it_lost(
    total: Callable[[Tensor], Tensor], grad: bool, shape: tuple[int, ...]
) -> None:
    def run(x: Tensor) -> Tensor:
        return total(x.requires_grad_() if grad else x)

    assert rules(lambda: run(torch.ones(shape, dtype=BF16))) == ["half-accumulator"]
    assert rules(lambda: run(torch.ones(shape))) == []


KEPT_SUMS: dict[str, Callable[[], Tensor]] = {
    "200 in bf16": lambda: torch.ones(200, 4, dtype=BF16),
    "400 in fp16": lambda: torch.ones(400, 4, dtype=FP16),
    "of both signs": lambda: torch.randn(400, 4, dtype=BF16),
}


@pairwise(total=SUMS, grad=[False, True], terms=list(KEPT_SUMS))
def test_a_sum_that_a_loop_adds_up_and_keeps_is_none(total: Callable[[Tensor], Tensor], grad: bool, terms: str) -> None:
    x = KEPT_SUMS[terms]()
    assert rules(lambda: total(x.requires_grad_() if grad else x)) == []


def test_a_sum_that_starts_anew_and_a_deep_residual_stream_lose_nothing() -> None:
    assert rules(lambda: emptied_again_and_again(torch.ones(800, 4, dtype=BF16))) == []
    there_and_back = torch.tensor([1.1] * 8 + [-1.1] * 8, dtype=BF16).repeat(4)[:, None].expand(-1, 4)
    for total in SUMS:
        assert rules(lambda total=total: total(there_and_back)) == []  # type: ignore[misc]
    scale = torch.full((), 1e-6, dtype=BF16)

    def blocks() -> Tensor:
        x = torch.randn(8, 16, dtype=BF16)
        for _ in range(300):
            x = x + scale * x.sin()
        return x

    assert rules(blocks) == []


def test_lint_says_how_far_a_sum_of_a_forward_is_off() -> None:
    class Adds(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return added_up(super().forward(x).sigmoid().expand(600, 8, 4))

    said = str(diagnose.lint(Adds(4, 4), torch.randn(8, 4), policy="bf16"))
    assert "half-accumulator" in said and "terms" in said and "% off by now" in said


@pytest.mark.parametrize("x", [1e-4, 1e-2, 1.0])
def test_a_logarithm_of_one_plus_little_is_told_by_lint(x: float) -> None:
    def rules_of(function: Callable[[Tensor], Tensor]) -> list[str]:
        with Trace(None, of_risks=True) as t, torch.autocast("cpu", dtype=BF16):
            function(x * torch.rand(8, 8).bfloat16())
        return [found.rule for found in t.report.record.lints]

    assert rules_of(lambda x: torch.log(1 + x)) == rules_of(lambda x: x.clone().add_(1).log())
    assert rules_of(lambda x: torch.log(1 + x)) == (["log-of-one-plus"] if x < 1e-3 else [])
    assert rules_of(torch.log1p) == rules_of(lambda x: (1 + x.float()).log()) == rules_of(lambda x: (x + 1).exp()) == []


def added_up_by_index(times: int) -> None:
    torch.zeros(1, dtype=BF16).index_put_((torch.zeros(times, dtype=torch.long),), torch.ones(times, dtype=BF16), True)


def rows_of_a_table(times: int) -> None:
    torch.nn.Embedding(2, 4, dtype=BF16)(torch.zeros(times, dtype=torch.long)).float().sum().backward()


def rows_of_a_tensor(times: int) -> None:
    torch.ones(2, 4, dtype=BF16, requires_grad=True)[torch.zeros(times, dtype=torch.long)].float().sum().backward()


@pytest.mark.parametrize("build", [added_up_by_index, rows_of_a_table, rows_of_a_tensor])
def test_what_one_op_adds_up_by_index_is_told_where_it_stops_counting(build: Callable[[int], None]) -> None:
    assert rules(lambda: build(256)) == []
    with Trace(None) as t:
        build(1000)
    [found] = t.report.record.lints
    said = explain_lint(found)
    assert found.rule == "half-accumulator" and "adds up, 74% off, is kept in bf16" in said.why
    assert "add it up in fp32, of x.float()" in said.advice


SUMS_BY_INDEX: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "scatter_add_": lambda total, index, x: total.scatter_add_(0, index, x),
    "scatter_add": lambda total, index, x: total.scatter_add(0, index, x),
    "index_add_": lambda total, index, x: total.index_add_(0, index, x),
    "index_put_": lambda total, index, x: total.index_put_((index,), x, accumulate=True),
    "scatter_reduce_": lambda total, index, x: total.scatter_reduce_(0, index, x, "sum"),
}


@pytest.mark.parametrize("name", sorted(SUMS_BY_INDEX))
def test_what_a_loop_adds_up_by_index_is_told_where_it_stops_counting(name: str) -> None:
    def run(times: int, kind: torch.dtype = BF16) -> None:
        total: Any = torch.zeros(3, dtype=kind)
        for _ in range(times):
            total = SUMS_BY_INDEX[name](total, torch.tensor([0, 2]), torch.ones(2, dtype=kind))

    assert rules(lambda: run(400)) == ["half-accumulator"]
    assert rules(lambda: run(200)) == [] == rules(lambda: run(400, torch.float32))


def test_what_is_written_by_index_is_no_sum() -> None:
    total = torch.zeros(3, dtype=BF16)

    def run() -> None:
        for number in range(400):
            total.index_put_((torch.tensor([0, 2]),), torch.full((2,), float(number), dtype=BF16))
            total.scatter_reduce_(0, torch.tensor([1]), torch.ones(1, dtype=BF16), "amax")

    assert rules(run) == []


@pytest.mark.parametrize("policy", ["bf16-master", pytest.param("bf16-master, grads=fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_many", [True, False])
def test_gradients_of_many_passes_added_up_in_16_bit_are_told_and_the_edit_that_is_told_keeps_them(
    policy: str, is_many: bool
) -> None:
    model, count = torch.nn.Linear(8, 4), 400 if is_many else 32
    amp = mezzo.prepare(model, mezzo.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    amp.backward(torch.nn.functional.cross_entropy(model(x), y))
    norm = float(amp.grad_norm())
    amp.zero_grad()
    with Trace(None) as t:
        for _ in range(count):
            amp.backward(torch.nn.functional.cross_entropy(model(x), y) / count)
        amp.zero_grad()
        for _ in range(2):  # a sum that was cleared starts anew
            amp.backward(torch.nn.functional.cross_entropy(model(x), y) / 2)
    loses = is_many and "grads" not in policy
    assert [x.rule for x in t.report.record.lints] == ["half-accumulator"] * loses
    assert float(amp.step().grad_norm) == pytest.approx(norm, rel=0.02)
    if loses:
        said = explain_lint(t.report.record.lints[0])
        assert "gradients of" in said.why and "backward passes" in said.why and "grads=fp32" in said.advice


class Bounded(torch.autograd.Function):
    """Hands on what it is given, and back what `change` makes of a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


def clamped(g: Tensor) -> Tensor:
    return g.clamp(-1.0, 1.0)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], float, bool]] = {
    "clamped": (clamped, 1024.0, True),
    "by a bound that is scaled": (lambda g: g.clamp(-1024.0, 1024.0), 1024.0, False),
    "by one that nothing reaches": (lambda g: g.mul(2.0**-12).clamp(-1.0, 1.0).mul(2.0**12), 1024.0, False),
    "without the negative": (lambda g: g.clamp_min(0.0), 1024.0, False),
    "reversed": (lambda g: -g, 1024.0, False),
    "clamped, under a weight of the loss": (clamped, 100.0, False),
}


@pytest.mark.parametrize("by_hook", [False, True])
@pytest.mark.parametrize(("change", "factor", "is_named"), CHANGES.values(), ids=CHANGES)
def test_a_hook_or_backward_that_clips_what_carries_the_loss_scale(
    change: Callable[[Tensor], Tensor], factor: float, is_named: bool, by_hook: bool
) -> None:
    model = torch.nn.Linear(4, 4)

    def run() -> Tensor:
        with mezzo.autocast("cpu", dtype=FP16):
            h = model(torch.ones(2, 4))
        if by_hook:
            h.register_hook(change)
        else:
            h = Bounded.apply(h, change)
        (h.float().sum() * factor).backward()
        return h

    assert rules(run) == ["clip-before-unscale"] * is_named
