"""What a fused optimizer is handed for a step, and what is left of it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.loss_scale import StepScaling, handing, parameters
from mezzo.loss_scale.fused import step_scaled

NAMES = ("grad_scale", "clip_coef", "found_inf")


class Fused(torch.optim.SGD):
    """Keeps what it was handed when it steps."""

    seen: dict[str, Tensor | None] | None = None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.seen = {name: getattr(self, name, None) for name in NAMES}
        return "stepped"


def optimizer() -> Fused:
    return Fused([nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize(
    ("own", "given", "wanted"), [(None, 8.0, 8.0), (2.0, None, 2.0), (2.0, 8.0, 16.0), (None, None, None)]
)
def test_a_scale_of_the_callers_multiplies_and_is_gone(own: float | None, given: float | None, wanted: Any) -> None:
    one = optimizer()
    if own is not None:
        one.grad_scale = torch.tensor(own)  # type: ignore[attr-defined]
    with handing(one, StepScaling(grad_scale=None if given is None else torch.tensor(given))):
        one.step()
    assert one.seen is not None
    scale = one.seen["grad_scale"]
    assert (None if scale is None else float(scale)) == wanted
    assert not [name for name in NAMES if hasattr(one, name)]


@pytest.mark.parametrize(("found", "outcome"), [(0.0, ("stepped", False)), (1.0, (None, True))])
def test_on_the_cpu_a_bad_step_is_not_begun(found: float, outcome: tuple[Any, bool]) -> None:
    one = optimizer()
    assert step_scaled(one, None, StepScaling(found_inf=torch.tensor(found)), (), {}) == outcome
    assert (one.seen is None) is outcome[1]


def test_parameters_stand_in_the_order_of_their_groups() -> None:
    first, second, third = (nn.Parameter(torch.ones(1)) for _ in range(3))
    one = torch.optim.SGD([{"params": [third, first]}, {"params": [second]}])
    assert [id(p) for p in parameters(one)] == [id(third), id(first), id(second)]
