"""SGD: the numbers of a step, with momentum of either kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tolerance import relative

from mezzo.optim import SGD

START, GRADS = [1.0, -2.0, 0.5], ([0.3, 0.01, -4.0], [-0.1, 0.2, 1.0], [2.0, 0.0, 1.0])


def by_hand(
    lr: float, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
    maximize: bool = False,
) -> torch.Tensor:  # fmt: skip
    p = torch.tensor(START, dtype=torch.float64)
    buffer: torch.Tensor | None = None
    for grad in GRADS:
        g = (-1 if maximize else 1) * torch.tensor(grad, dtype=torch.float64) + weight_decay * p
        buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
        p = p - lr * (g + momentum * buffer if nesterov else buffer if momentum else g)
    return p


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.3},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.8, "nesterov": True},
        {"momentum": 0.8, "maximize": True},
    ],
    ids=str,
)
def test_three_steps_are_those_of_the_formula(options: dict[str, Any]) -> None:
    param = torch.nn.Parameter(torch.tensor(START))
    optimizer = SGD([param], lr=0.1, **options)
    for grad in GRADS:
        param.grad = torch.tensor(grad)
        optimizer.step()
    want = by_hand(0.1, **options)
    assert ((param.detach() - want).abs() <= relative(torch.float32, 20) * want.abs().clamp(min=1)).all()


def test_only_momentum_keeps_a_buffer() -> None:
    for momentum, names in ((0.0, set()), (0.9, {"momentum_buffer"})):
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = SGD([param], lr=0.1, momentum=momentum)
        param.grad = torch.ones(2)
        optimizer.step()
        assert {name for name in optimizer.state[param] if name.startswith("momentum")} == names
        assert set(optimizer.moment_names(optimizer.param_groups[0])) == names
