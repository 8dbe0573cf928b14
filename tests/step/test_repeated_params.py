"""A parameter that stands twice in the groups of one optimizer: torch steps it twice with one gradient, and its rows of state are one."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import mezzo
from mezzo.errors import StepError

POLICIES = ["bf16", "bf16-master", "fp16-master, scaling.init_scale=16"]
LATER: dict[str, Callable[[Optimizer], object]] = {
    "parameter": lambda optimizer: optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0]),
    "group": lambda optimizer: optimizer.param_groups.append(dict(optimizer.param_groups[0])),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_refused_by_prepare(policy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the same
        optimizer = torch.optim.AdamW([*model.parameters(), model[0].weight], lr=0.1)
    with pytest.raises(StepError, match=r"AdamW has 0\.weight more than once .*dict\.fromkeys"):
        mezzo.prepare(model, optimizer, policy)
    assert model[0].weight.dtype is torch.float32 and type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("later", LATER)
def test_it_is_refused_later_before_anything_is_changed(later: str, policy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy)
    amp.backward(model(torch.ones(2, 4)).sum())
    amp.step()
    amp.zero_grad()
    before = amp.export_weights()
    LATER[later](amp.optimizers[0])
    with pytest.raises(StepError, match=r"AdamW has 0\.weight.* more than once"):
        amp.backward(model(torch.ones(2, 4)).sum())
    assert all(torch.equal(value, before[name]) for name, value in amp.export_weights().items())


def test_two_optimizers_may_share_one() -> None:
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)], "bf16")
    amp.backward(model(torch.ones(2, 4)).sum())
    assert amp.step()


NO_LIST: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "generator": lambda params: (p for p in params),
    "str": lambda params: [*params, "head"],
    "float": lambda params: [3.0],
    "dict": lambda params: {"weight": params[0]},
    "Parameter": lambda params: params[0],
    "NoneType": lambda params: None,
}


@pytest.mark.parametrize("kind", NO_LIST)
@pytest.mark.parametrize("drops", [True, False])
def test_groups_that_hold_no_parameters_any_more_are_refused_in_a_sentence(kind: str, drops: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, "bf16")
    amp.backward(model(torch.ones(2, 4)).sum())
    amp.step()
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = NO_LIST[kind](params)
    with pytest.raises(
        StepError, match=rf"AdamW\.param_groups\[0\]\['params'\] .*{kind}.*list\(module\.parameters\(\)\)"
    ):
        amp.zero_grad() if drops and kind != "Parameter" else model.zero_grad()
        model(torch.ones(2, 4))
    optimizer.param_groups[0]["params"] = params
    amp.zero_grad()
    amp.backward(model(torch.ones(2, 4)).sum())
    assert amp.step()
