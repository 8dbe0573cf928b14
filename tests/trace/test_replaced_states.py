"""Averages and weights in 16 bit that a program replaces by hand, outside of modules: named where they do not move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport

BF16, FP16 = torch.bfloat16, torch.float16
KEPT = 1 - 2.0**-14
"""Share of an average that stays: what comes in is far below the spacing of bf16 and of fp16."""
RATE = 2.0**-22


def trained(
    update: Callable[[dict[str, Tensor], nn.Module], None], dtype: torch.dtype = BF16, steps: int = 6
) -> TraceReport:
    """Train, and hand a state in 16 bit, which starts as the weights, to `update` after each step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    state = {k: p.detach().to(dtype) for k, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnose.trace() as t:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 8)), torch.randint(4, (8,))).backward()
            optimizer.step()
            update(state, model)
    return t.report


@torch.no_grad()
def average(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, p in model.named_parameters():
        state[k] = KEPT * state[k] + (1 - KEPT) * p.to(state[k].dtype)  # LOST


@torch.no_grad()
def drawn_nearer(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, p in model.named_parameters():
        state[k] = state[k].lerp(p.to(state[k].dtype), 1 - KEPT)  # LOST


@torch.no_grad()
def by_difference(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, p in model.named_parameters():
        state[k] = state[k] + (p - state[k]).to(state[k].dtype) * (1 - KEPT)  # LOST


@torch.no_grad()
def widened_for_a_moment(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, p in model.named_parameters():
        state[k] = (KEPT * state[k].float() + (1 - KEPT) * p).to(state[k].dtype)  # LOST


@torch.no_grad()
def copied(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, p in model.named_parameters():
        state[k].copy_(KEPT * state[k].float() + (1 - KEPT) * p)  # LOST


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("update", [average, drawn_nearer, by_difference, widened_for_a_moment, copied])
def test_an_average_that_is_replaced_and_does_not_move_is_named(
    update: Callable[[dict[str, Tensor], nn.Module], None], dtype: torch.dtype
) -> None:
    [found] = trained(update, dtype).findings
    assert (found.verdict, found.phase) == ("lost-update", "optimizer") and found.frame is not None
    assert "LOST" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]
    assert "the program computed for" in found.why and "keep in fp32" in found.fix.advice
    assert trained(update, torch.float32).answer == "healthy"  # which is what it advises


def moves(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, p in model.named_parameters():
        state[k] = 0.9 * state[k] + 0.1 * p.detach().to(BF16)


def stays_where_it_came_to(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, p in model.named_parameters():
        state[k] = 0.5 * state[k] + 0.5 * (1.001 * torch.ones_like(p.detach())).to(BF16)


def written_anew(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, p in model.named_parameters():
        state[k] = p.detach().to(BF16) + 2.0**-12


@torch.no_grad()
def compensated(state: dict[str, Tensor], model: nn.Module) -> None:
    """Kahan 1965."""
    for k, _ in model.named_parameters():
        rest = state.get(f"rest.{k}", torch.zeros_like(state[k]))
        term = 2.0**-12 - rest
        total = state[k] + term
        state[f"rest.{k}"] = (total - state[k]) - term
        state[k] = total


@torch.no_grad()
def split_in_two(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, _ in model.named_parameters():
        rest = state.get(f"rest.{k}", torch.zeros_like(state[k]))
        wide = state[k].float() + rest.float() + 2.0**-12
        state[k] = wide.to(BF16)
        state[f"rest.{k}"] = (wide - state[k].float()).to(BF16)


@torch.no_grad()
def of_masters(state: dict[str, Tensor], model: nn.Module) -> None:
    for k, _ in model.named_parameters():
        master = state[f"master.{k}"] = state.get(f"master.{k}", state[k].float()) + 2.0**-14
        state[k] = master.to(BF16)


@torch.no_grad()
def layers_that_add_little(state: dict[str, Tensor], model: nn.Module) -> None:
    h = torch.ones(8, 8, dtype=BF16)
    for _ in range(24):
        h = h + 2.0**-12 * torch.ones(8, 8, dtype=BF16)


@pytest.mark.parametrize(
    "update",
    [moves, stays_where_it_came_to, written_anew, compensated, split_in_two, of_masters, layers_that_add_little],
)
def test_what_moves_or_is_kept_elsewhere_is_healthy(update: Callable[[dict[str, Tensor], nn.Module], None]) -> None:
    assert trained(update, steps=8).answer == "healthy"


def stepped(replace: Callable[[nn.Parameter], None], dtype: torch.dtype = BF16) -> TraceReport:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(dtype)
    with diagnose.trace() as t:
        for _ in range(6):
            F.cross_entropy(model(torch.randn(8, 8).to(dtype)).float(), torch.randint(4, (8,))).backward()
            for p in model.parameters():
                replace(p)
                p.grad = None
    return t.report


def by_data(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.data = p.data - RATE * p.grad  # LOST


def decayed(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.data = p.data - RATE * (p.grad + 0.01 * p.data)  # LOST


def copied_back(p: nn.Parameter) -> None:
    assert p.grad is not None
    with torch.no_grad():
        p.copy_(p - RATE * p.grad)  # LOST


@pytest.mark.parametrize("replace", [by_data, decayed, copied_back])
def test_weights_that_are_replaced_and_do_not_move_are_named(replace: Callable[[nn.Parameter], None]) -> None:
    [found] = stepped(replace).findings
    assert found.verdict == "lost-update" and found.frame is not None
    assert "LOST" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]
    assert stepped(replace, torch.float32).answer == "healthy"


def test_weights_that_are_replaced_at_a_rate_that_moves_them_are_healthy() -> None:
    def far(p: nn.Parameter) -> None:
        assert p.grad is not None
        p.data = p.data - 1.0 * p.grad

    assert stepped(far).answer == "healthy"


class Replacing(torch.optim.Optimizer):
    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data = p.data - RATE * p.grad


def test_an_optimizer_of_ones_own_that_replaces_its_weights_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(BF16)
    optimizer = Replacing(model.parameters())
    with diagnose.trace() as t:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 8).to(BF16)).float(), torch.randint(4, (8,))).backward()
            optimizer.step()
    [found] = t.report.findings
    assert found.verdict == "lost-update" and "Replacing computed for" in found.why
