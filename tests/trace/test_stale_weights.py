"""Masters, or a copy in 16 bit, kept by hand: what the loss is computed from has to be written after each step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
