"""The edit that a diagnosis prints, applied as it is printed, makes the step finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose

Function = Callable[[Tensor], Tensor]
PROGRAMS: dict[str, tuple[Function, str]] = {
    "eps in a logarithm": (lambda x: torch.log((x * 8).softmax(-1) * 0 + 1e-9), "fp16"),
    "eps in a quotient": (lambda x: x / (x.abs().sum() * 0 + 1e-9), "fp16"),
    "sigmoid rounds to 1": (lambda x: torch.log(1 - torch.sigmoid(x.abs() + 9)), "bf16"),
    "tanh rounds to 1": (lambda x: torch.log(1 - torch.tanh(x.abs() + 5)), "fp16"),
    "squares overflow": (lambda x: (x * 1e3).square().mean(-1).rsqrt(), "fp16"),
}


class Model(nn.Module):
    def __init__(self, compute: Function) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 4), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layer(x))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_printed_edit_makes_the_step_finite(name: str) -> None:
    compute, preset = PROGRAMS[name]
    model, x = Model(compute), torch.randn(3, 4)
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[preset]):
            y = model(x)
        y.float().mean().backward()
    fix = t.report.findings[0].fix
    assert fix.edit
    mezzo.prepare(model, None, f"{preset}, {fix.edit}")
    assert model(x).isfinite().all()


@pytest.mark.parametrize("divisor", [[0.0, 3.0], [0.0, -3.0]])
def test_the_printed_replacement_is_finite_with_its_gradients(divisor: list[float]) -> None:
    x, y = torch.tensor([0.1, 2.0], requires_grad=True), torch.tensor(divisor)
    with diagnose.trace() as t:
        (x / y).sum().backward()
    fix = t.report.findings[0].fix
    expression = fix.advice.removeprefix("write ").removesuffix(".")
    x.grad = None
    out = eval(expression, {"torch": torch, "x": x, "y": y})
    out.sum().backward()
    assert fix.tried and out.isfinite().all() and x.grad is not None and x.grad.abs().max() < 1e8


def test_a_norm_of_zero_is_no_count() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    with diagnose.trace() as t:
        h = x * 1.0
        (h / h.norm(dim=-1, keepdim=True)).sum().backward()
    assert t.report.findings[0].fix.advice == "write x / y.clamp(min=1e-06)."


def test_what_could_not_be_tried_is_an_idea() -> None:
    w = nn.Parameter(torch.zeros(3))
    with diagnose.trace() as t:
        torch.hypot(w, w * 1).sum().backward()
    assert t.report.findings[0].fix.tried == "" and "\n  idea " in str(t.report)


def test_the_old_name_names_the_new_one() -> None:
    x = torch.zeros(2, requires_grad=True)
    with diagnose.trace() as t:
        x.log().sum().backward()
    with pytest.raises(AttributeError, match="now called fix"):
        _ = t.report.findings[0].mend
