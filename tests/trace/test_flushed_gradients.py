"""Norms and softmaxes over one number: named with what lies before them, which they hand no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.fuzz.blocks import Residual
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport

Loss = Callable[[Tensor, Tensor], Tensor]


def distance(z: Tensor, x: Tensor) -> Tensor:
    return (z.float() - x[:, :1]).square().mean()


def first_class(z: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(z.float(), torch.zeros(len(z), dtype=torch.long))


def likelihood(z: Tensor, x: Tensor) -> Tensor:
    return -z.float().log_softmax(-1).mean()


def trained(
    *tail: nn.Module,
    width: int = 1,
    loss: Loss = distance,
    dtype: torch.dtype | None = None,
    steps: int = 4,
    passes: int = 1,
) -> TraceReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, width), *tail)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with diagnose.trace() as t:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(passes):
                x = torch.randn(8, 8)
                with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    z = model(x)
                loss(z, x).backward()
            optimizer.step()
    return t.report


CASES = {
    "layer_norm": ((nn.LayerNorm(1),), 1, distance),
    "group_norm": ((nn.GroupNorm(4, 4), nn.Linear(4, 1)), 4, distance),
    "softmax": ((nn.Softmax(-1),), 1, distance),
    "log_softmax": ((), 1, likelihood),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("op", CASES)
def test_what_lies_before_an_op_over_one_number_is_named(op: str, dtype: torch.dtype | None, passes: int) -> None:
    tail, width, loss = CASES[op]
    steps = 4 if op.endswith("norm") else 32
    found = trained(*tail, width=width, loss=loss, dtype=dtype, passes=passes, steps=steps).findings
    assert [(f.verdict, f.op) for f in found] == [("zero-gradients", op)]
    assert f"{op} over one number gives the same whatever it is given" in found[0].why
    assert "more than one number" in found[0].fix.advice and not found[0].fix.edit


def test_a_loss_of_a_single_logit_is_named() -> None:
    [found] = trained(loss=first_class, steps=32).findings
    assert (found.verdict, found.op) == ("zero-gradients", "log_softmax")
    assert "binary_cross_entropy_with_logits" in found.fix.advice


@pytest.mark.parametrize("tail", [(), (nn.LayerNorm(2),), (nn.GroupNorm(1, 2),), (nn.Softmax(-1),)])
def test_more_than_one_number_trains(tail: tuple[nn.Module, ...]) -> None:
    assert trained(*tail, width=2).answer == "healthy"


def test_a_group_over_more_than_one_place_trains() -> None:
    assert trained(nn.Unflatten(1, (4, 2)), nn.GroupNorm(4, 4), nn.Flatten(), width=8).answer == "healthy"


def test_what_has_another_way_to_the_loss_is_healthy() -> None:
    assert trained(Residual(nn.LayerNorm(1))).answer == "healthy"


def test_fewer_passes_are_no_evidence() -> None:
    assert trained(nn.LayerNorm(1), steps=2).answer == "healthy"
    assert trained(nn.Softmax(-1), steps=31).answer == "healthy"


@pytest.mark.parametrize("op", CASES)
def test_lint_names_it_in_one_step(op: str) -> None:
    tail, width, loss = CASES[op]
    model = nn.Sequential(nn.Linear(8, width), *tail)
    found = diagnose.lint(model, torch.randn(8, 8), lambda model, batch: loss(model(batch), batch)).warnings
    assert {w.lint.rule for w in found} == {"zero-gradients"} and f"{op} over one number" in found[0].why
