"""AdamW and Adam: the numbers of a step, as their papers have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tolerance import relative

from mezzo.optim import Adam, AdamW
from mezzo.optim.base import MasterOptimizer

START, GRAD = [1.0, -2.0, 0.5], [0.3, 0.01, -4.0]


def stepped(kind: type[AdamW], **options: Any) -> tuple[MasterOptimizer, torch.nn.Parameter]:
    param = torch.nn.Parameter(torch.tensor(START))
    optimizer = kind([param], **options)
    for sign in (1.0, -0.5):
        param.grad = sign * torch.tensor(GRAD)
        optimizer.step()
    return optimizer, param


def by_hand(
    lr: float, betas: tuple[float, float], eps: float, decoupled: float, l2: float, amsgrad: bool, maximize: bool
) -> torch.Tensor:
    p = torch.tensor(START, dtype=torch.float64)
    m = v = largest = torch.zeros_like(p)
    for t, sign in enumerate((1.0, -0.5), start=1):
        g = (-sign if maximize else sign) * torch.tensor(GRAD, dtype=torch.float64) + l2 * p
        p = p - lr * decoupled * p
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        largest = torch.maximum(largest, v)
        second = largest if amsgrad else v
        p = p - lr * (m / (1 - betas[0] ** t)) / ((second / (1 - betas[1] ** t)).sqrt() + eps)
    return p


@pytest.mark.parametrize("kind", [AdamW, Adam])
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.5, 0.6), "eps": 1e-2}], ids=str
)
def test_two_steps_are_those_of_the_paper(kind: type[AdamW], decay: float, options: dict[str, Any]) -> None:
    _, param = stepped(kind, lr=0.05, weight_decay=decay, **options)
    given = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False, **options}
    is_decoupled = kind is AdamW
    want = by_hand(0.05, decoupled=decay * is_decoupled, l2=decay * (not is_decoupled), **given)
    assert ((param.detach() - want).abs() <= relative(torch.float32, 20) * want.abs().clamp(min=1)).all()


@pytest.mark.parametrize(("amsgrad", "names"), [(False, 2), (True, 3)])
def test_moments_have_torchs_names(amsgrad: bool, names: int) -> None:
    optimizer, param = stepped(AdamW, amsgrad=amsgrad)
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], amsgrad=amsgrad)
    plain.param_groups[0]["params"][0].grad = torch.ones(1)
    plain.step()
    theirs = set(plain.state[plain.param_groups[0]["params"][0]]) - {"step"}
    assert set(optimizer.moment_names(optimizer.param_groups[0])) == theirs and len(theirs) == names
    assert theirs <= set(optimizer.state[param])


def test_adam_decays_in_the_gradient_unless_its_group_says_otherwise() -> None:
    optimizer, _ = stepped(Adam, weight_decay=0.5)
    group = optimizer.param_groups[0]
    assert optimizer.rule(group).l2 == 0.5
    assert optimizer.rule({**group, "decoupled_weight_decay": True}).l2 == 0.0
    assert AdamW([torch.nn.Parameter(torch.ones(1))], weight_decay=0.5).rule({**group}).l2 == 0.0
