"""A norm that has no value says of which of its numbers, and what to write is tried here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose


def fault_of(model: nn.Module, x: Tensor) -> diagnose.Finding:
    with diagnose.trace(model) as t:
        model(x).square().mean().backward()
    assert t.report.faults, str(t.report)
    return t.report.faults[0]


@pytest.mark.parametrize(
    "norm",
    [
        lambda eps: nn.LayerNorm(8, eps=eps),
        lambda eps: nn.GroupNorm(2, 8, eps=eps),
    ],
)
def test_of_equal_values_without_eps(norm: Callable[[float], nn.Module]) -> None:
    x = torch.ones(4, 8, requires_grad=True)
    found = fault_of(norm(0.0), x)
    assert found.verdict == "singularity" and "give the layer an eps, for example 1e-5" in found.fix.advice
    assert "same in all rows" not in found.why
    x.grad = None
    norm(1e-5)(x).square().mean().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (8,)), (nn.BatchNorm2d, (3, 5))])
def test_by_a_variance_below_0(norm: type[nn.BatchNorm1d], shape: tuple[int, ...]) -> None:
    layer = norm(8).eval()
    layer.running_var[3] = -1.0  # type: ignore[index]
    found = fault_of(layer, torch.randn(4, 8, *shape, requires_grad=True))
    assert found.fix.advice.startswith("running_var holds -1, and no variance is below 0: reset")
    assert "its bias is 0" not in found.why
