"""A 16-bit state that a forward updates itself, as a running average: named where its updates are lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose

BF16, FP16 = torch.bfloat16, torch.float16


class Keeps(nn.Module):
    """A layer that keeps a state, which `update` brings up to date at each call."""

    def __init__(self, update: Callable[[Keeps, Tensor], None], dtype: torch.dtype, start: float = 1.0) -> None:
        super().__init__()
        self.body, self.update = nn.Linear(4, 4).to(dtype), update
        self.register_buffer("ema", torch.full((4,), start, dtype=dtype))
        self.register_buffer("rest", torch.zeros(4, dtype=dtype))
        self.register_buffer("count", torch.full((), 512.0 if dtype is BF16 else 4096.0, dtype=dtype))
        self.teacher = nn.Linear(4, 4).to(dtype).requires_grad_(False)
        nn.init.ones_(self.teacher.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.update(self, self.body(x).detach())
        return self.body(x)


def in_place(m: Keeps, y: Tensor) -> None:
    m.ema.mul_(1 - 2.0**-15).add_(y.mean(0), alpha=2.0**-15)


def replaced(m: Keeps, y: Tensor) -> None:
    m.ema = (1 - 2.0**-15) * m.ema + 2.0**-15 * y.mean(0)


def copied(m: Keeps, y: Tensor) -> None:
    m.ema.copy_(m.ema.float() + 2.0**-15 * (y.mean(0).float() - m.ema))


def drawn_nearer(m: Keeps, y: Tensor) -> None:
    m.ema.lerp_(y.mean(0), 2.0**-15)


def row_by_row(m: Keeps, y: Tensor) -> None:
    for i in range(4):
        m.ema[i] = m.ema[i] + 2.0**-15


def decays(m: Keeps, y: Tensor) -> None:
    m.ema *= 1 - 2.0**-15


def counted(m: Keeps, y: Tensor) -> None:
    m.count += 1


def of_a_teacher(m: Keeps, y: Tensor) -> None:
    for kept, p in zip(m.teacher.parameters(), m.body.parameters(), strict=True):
        kept.data = kept.data * (1 - 2.0**-15) + p.data * 2.0**-15


LOSING = {
    in_place: "ema", replaced: "ema", copied: "ema", drawn_nearer: "ema", row_by_row: "ema", decays: "ema", counted: "count",
    of_a_teacher: "teacher.weight",
}  # fmt: skip


def traced(module: Keeps, calls: int = 3) -> diagnose.TraceReport:
    dtype = module.ema.dtype
    with diagnose.trace(module) as t:
        for _ in range(calls):
            module(torch.randn(2, 4, dtype=module.body.weight.dtype)).float().sum().backward()
    assert module.ema.dtype is dtype
    return t.report


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("update", LOSING)
def test_a_state_that_its_own_forward_does_not_move_is_named(
    update: Callable[[Keeps, Tensor], None], dtype: torch.dtype
) -> None:
    report = traced(Keeps(update, dtype))
    found = report.findings[0]
    assert (found.verdict, found.phase, found.path) == ("lost-update", "forward", LOSING[update])
    assert found.frame is not None and found.frame.function == update.__name__ and found.frame.file == __file__
    assert "forward computed for" in found.why


def test_every_step_in_which_it_does_not_move_is_counted() -> None:
    module = Keeps(in_place, BF16)
    with diagnose.trace(module) as t:
        for _ in range(6):
            module.zero_grad()
            module(torch.randn(2, 4, dtype=module.body.weight.dtype)).float().sum().backward()
    assert t.report.findings[0].steps == (0, 1, 2, 3, 4, 5)


def test_so_is_every_step_of_an_average_outside_of_the_model() -> None:
    model, average = nn.Linear(4, 4), torch.ones(4, 4, dtype=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with diagnose.trace(model) as t:
        for x in torch.randn(4, 2, 4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            average.lerp_(model.weight.detach().to(BF16), 0.001)
    assert t.report.findings[0].steps == (0, 1, 2, 3)


@pytest.mark.parametrize("update", LOSING)
def test_lint_names_it_in_one_call(update: Callable[[Keeps, Tensor], None]) -> None:
    found = diagnose.lint(Keeps(update, BF16), torch.randn(2, 4, dtype=BF16))
    assert [w.lint.rule for w in found.warnings if w.lint.rule != "loss-in-16-bit"] == ["half-accumulator"]


def test_lint_names_an_average_that_starts_at_0() -> None:
    """Its first updates are not lost; those from where it is some thousandths of a value are."""
    assert "half-accumulator" in str(diagnose.lint(Keeps(in_place, BF16, start=0.0), torch.randn(2, 4, dtype=BF16)))


@pytest.mark.parametrize("update", LOSING)
def test_the_same_in_fp32_is_healthy(update: Callable[[Keeps, Tensor], None]) -> None:
    assert traced(Keeps(update, torch.float32)).answer == "healthy"


def written_once(m: Keeps, y: Tensor) -> None:
    if not hasattr(m, "mask"):
        m.mask = torch.ones(4, dtype=BF16).cumsum(0)
    y.add_(m.mask)


def kept_as_it_is(m: Keeps, y: Tensor) -> None:
    m.last = y.mean(0)
    m.ema = m.ema + 0.0 * m.ema


def normalised(m: Keeps, y: Tensor) -> None:
    m.ema = m.ema / m.ema.float().norm().to(BF16)


def leaks_fast(m: Keeps, y: Tensor) -> None:
    """What goes half the way at each call stops where it goes."""
    m.ema += (torch.full_like(m.ema, 1.001) - m.ema) / 2


def compensated(m: Keeps, y: Tensor) -> None:
    """Kahan 1965."""
    m.rest.add_(torch.full_like(m.rest, 2.0**-15))
    before = m.ema.clone()
    m.ema.add_(m.rest)
    m.rest.add_(before.sub_(m.ema))


def moves(m: Keeps, y: Tensor) -> None:
    m.ema.mul_(0.9).add_(y.mean(0), alpha=0.1)


@pytest.mark.parametrize("update", [written_once, kept_as_it_is, normalised, leaks_fast, compensated, moves])
def test_a_state_that_loses_nothing_is_healthy(update: Callable[[Keeps, Tensor], None]) -> None:
    module = Keeps(update, BF16)
    assert [f"{f.verdict} {f.path} {f.why}" for f in traced(module, calls=6).findings] == []
    found = diagnose.lint(module, torch.randn(2, 4, dtype=BF16))
    assert {w.lint.rule for w in found.warnings} <= {"loss-in-16-bit"}


def test_a_state_in_fp32_beside_16_bit_weights_is_healthy() -> None:
    module = Keeps(in_place, BF16)
    module.ema = module.ema.float()
    assert traced(module).answer == "healthy"


def test_one_call_alone_is_no_fault() -> None:
    assert traced(Keeps(in_place, BF16), calls=1).answer == "healthy"


def test_a_teacher_in_16_bit_is_no_trainable_weight() -> None:
    teacher, student = torch.nn.Linear(4, 4).to(BF16), torch.nn.Linear(4, 4)
    with diagnose.trace() as t:
        with torch.autocast("cpu", dtype=BF16), torch.no_grad():
            target = teacher(torch.ones(2, 4)).float()
        with torch.autocast("cpu", dtype=BF16):
            loss = (student(torch.ones(2, 4)).float() - target).square().mean()
        loss.backward()
    assert t.record.lints == () and t.report.answer == "healthy"
