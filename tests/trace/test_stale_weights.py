"""Masters, or a copy in 16 bit, kept by hand or by a region: what the loss is computed from has to be written after each step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport

Back = Callable[[list[Tensor], nn.Module], None]


def nothing(masters: list[Tensor], model: nn.Module) -> None: ...


@torch.no_grad()
def copied(masters: list[Tensor], model: nn.Module) -> None:
    for master, p in zip(masters, model.parameters(), strict=True):
        p.copy_(master)


def copied_past_autograd(masters: list[Tensor], model: nn.Module) -> None:
    for master, p in zip(masters, model.parameters(), strict=True):
        p.data.copy_(master.data)


def replaced(masters: list[Tensor], model: nn.Module) -> None:
    for master, p in zip(masters, model.parameters(), strict=True):
        p.data = master.detach().half()


def trained(back: Back, steps: int = 40, of_a_model: bool = False) -> TraceReport:
    torch.manual_seed(0)
    wide = nn.Linear(8, 4)
    model = copy.deepcopy(wide).half()
    masters = [*wide.parameters()] if of_a_model else [p.detach().clone().requires_grad_() for p in wide.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with diagnose.trace() as t:
        for _ in range(steps):
            model.zero_grad()
            (F.cross_entropy(model(torch.randn(8, 8).half()).float(), torch.randint(4, (8,))) * 128).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = p.grad.float() / 128
            optimizer.step()  # STALE
            back(masters, model)
    return t.report


@pytest.mark.parametrize("of_a_model", [False, True])
def test_weights_that_nobody_writes_are_a_fault_at_the_step(of_a_model: bool) -> None:
    [found] = trained(nothing, of_a_model=of_a_model).findings
    assert found.frame is not None and (found.verdict, found.op) == ("no-gradients", "step")
    assert "STALE" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]
    assert "while weight, bias, which had, never changed" in found.why and "p.copy_(master)" in found.fix.advice


@pytest.mark.parametrize("of_a_model", [False, True])
@pytest.mark.parametrize("back", [copied, copied_past_autograd, replaced])
def test_the_advice_makes_it_train(back: Back, of_a_model: bool) -> None:
    assert trained(back, of_a_model=of_a_model).answer == "healthy"


def test_few_steps_are_no_evidence() -> None:
    assert trained(nothing, steps=31).answer == "healthy"


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_input_that_is_optimised_through_weights_that_stay_is_no_fault(by_hand: bool) -> None:
    model, z = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.Adam([z], lr=0.1)
    with diagnose.trace() as t:
        for _ in range(40):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(z), torch.arange(4))
            if by_hand:
                (z.grad,) = torch.autograd.grad(loss, [z])
            else:
                loss.backward()
            optimizer.step()
    assert t.report.answer == "healthy"


Step = Callable[[Tensor, Tensor, float], object]
"""Updates a weight by its gradient and the loss scale."""


def sgd(p: Tensor, grad: Tensor, scale: float) -> None:
    p -= 0.1 * grad


def by_data(p: Tensor, grad: Tensor, scale: float) -> None:
    p.data.add_(grad, alpha=-0.1)


def all_at_once(p: Tensor, grad: Tensor, scale: float) -> None:
    torch._foreach_add_([p], [grad], alpha=-0.1)


def written_back(p: Tensor, grad: Tensor, scale: float) -> None:
    average = torch.zeros_like(p).lerp_(grad, 0.5)
    p.copy_(p - 0.1 * (average + 1e-2 * p))


def divided(p: Tensor, grad: Tensor, scale: float) -> None:
    p -= 0.1 * (grad / scale)


def divided_in_place(p: Tensor, grad: Tensor, scale: float) -> None:
    p.sub_(grad.mul_(1 / scale), alpha=0.1)


def by_a_small_rate(p: Tensor, grad: Tensor, scale: float) -> None:
    p.sub_(grad, alpha=0.1 / scale)


def adam(p: Tensor, grad: Tensor, scale: float) -> None:
    p.addcdiv_(0.5 * grad, (0.5 * grad).square().sqrt() + 1e-3, value=-1e-3)
    p -= 1e-3 * grad / (grad.norm() + 1e-8)


@pytest.mark.parametrize(
    "step", [sgd, by_data, all_at_once, written_back, divided, divided_in_place, by_a_small_rate, adam]
)
@pytest.mark.parametrize("is_in_grad", [True, False])
def test_a_step_by_hand_on_gradients_that_are_still_scaled_is_named_before_what_overflows(
    step: Step, is_in_grad: bool
) -> None:
    torch.manual_seed(0)
    model, scaler = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.amp.GradScaler("cpu")
    with diagnose.trace(model) as t:
        for _ in range(4):
            x = torch.randn(16, 8)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = scaler.scale((model(x).float() - x).square().mean())
            if is_in_grad:
                model.zero_grad()
                loss.backward()
            grads = (
                [p.grad for p in model.parameters()] if is_in_grad else torch.autograd.grad(loss, [*model.parameters()])
            )
            with torch.no_grad():
                for p, grad in zip(model.parameters(), grads, strict=True):
                    step(p, grad, scaler.get_scale())
    if step in (sgd, by_data, all_at_once, written_back):
        first = t.report.findings[0]
        assert first.verdict == "scaled-step" and "divide by scaler.get_scale()" in first.fix.advice
        assert first.frame is not None and first.frame.function == step.__name__
    else:
        assert t.report.answer == "healthy"


def steps_in(outer: AbstractContextManager[object], each: Callable[[], AbstractContextManager[object]]) -> TraceReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnose.trace(model) as t, outer:
        for _ in range(3):
            optimizer.zero_grad()
            with each():
                losses = [F.cross_entropy(model(torch.randn(8, 8)), torch.randint(4, (8,))) for _ in range(2)]  # READ
            sum(losses).backward()
            optimizer.step()
    return t.report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_region_around_the_whole_loop_keeps_the_casts_of_the_first_step(dtype: torch.dtype) -> None:
    found, other = steps_in(torch.autocast("cpu", dtype), nullcontext).findings
    assert (other.verdict, other.module) == ("stale-cast", "2")
    assert (found.verdict, found.module, found.op, found.step) == ("stale-cast", "0", "addmm", 1)
    assert (
        found.frame is not None
        and "READ" in Path(found.frame.file).read_text("utf-8").splitlines()[found.frame.line - 1]
    )
    assert "parameter 0.bias was changed" in found.why and "with torch.autocast" in found.fix.advice


@pytest.mark.parametrize("outer, each", [
    (nullcontext(), lambda: torch.autocast("cpu", torch.bfloat16)),
    (torch.autocast("cpu", torch.bfloat16, cache_enabled=False), nullcontext),
    (torch.autocast("cpu", torch.bfloat16), lambda: torch.autocast("cpu", enabled=False)),
    (mezzo.autocast("cpu", torch.bfloat16), nullcontext),
])  # fmt: skip
def test_casts_that_are_made_anew_are_healthy(
    outer: AbstractContextManager[object], each: Callable[[], AbstractContextManager[object]]
) -> None:
    assert steps_in(outer, each).is_healthy


@pytest.mark.parametrize("changed", [True, False])
def test_weights_exchanged_inside_of_a_region_are_not_used(changed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    average = {name: p + changed for name, p in copy.deepcopy(model.state_dict()).items()}
    with diagnose.trace(model) as t, torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(2, 8)).float().square().mean()
        model.load_state_dict(average)
        (loss + model(torch.randn(2, 8)).float().square().mean()).backward()
    assert [f.verdict for f in t.report.findings] == ["stale-cast"] * changed


def test_an_old_copy_that_no_gradient_reaches_is_meant() -> None:
    """A target network, written in another dtype, is behind its model on purpose."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        target = model.weight.bfloat16()
    with diagnose.trace(model) as t:
        for _ in range(3):
            x = torch.randn(8, 8)
            optimizer.zero_grad()
            (model(x) - F.linear(x.bfloat16(), target).float()).square().mean().backward()
            optimizer.step()
    assert t.report.is_healthy


@pytest.mark.parametrize("unscales, bound, is_named", [
    (False, 1.0, True), (True, 1.0, False), (False, 2.0**20, False), (False, 1e3, False),
])  # fmt: skip
@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_that_are_clamped_by_hand_while_they_are_scaled_are_named(
    unscales: bool, bound: float, is_named: bool, at_once: bool
) -> None:
    """Only torch's own functions were; a bound that no gradient reaches clips nothing, and one with the scale in it is meant."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(8, 4), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnose.trace(model) as t:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if at_once:
                torch._foreach_clamp_max_(grads, bound)
            for grad in grads:
                grad.clamp_(-bound, bound)
            scaler.step(optimizer)
            scaler.update()
    assert [f.verdict for f in t.report.findings] == ["clip-before-unscale"] * is_named
