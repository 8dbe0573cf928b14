"""What an optimizer keeps from step to step is used only while every tensor is where it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optim.streams import equal, snapshot
from torch import Tensor

from mezzo.errors import ConfigError
from mezzo.optim import SGD, AdamW
from mezzo.optim.base import MasterOptimizer

Disturb = Callable[[MasterOptimizer, list[torch.nn.Parameter]], None]
STEPS = 6


def build(kind: type[MasterOptimizer]) -> tuple[MasterOptimizer, list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in ((6, 6), (6,), (3, 12))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    options: dict[str, Any] = {"master": "split"} | ({"momentum": 0.9} if kind is SGD else {"weight_decay": 0.1})
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.03, "master": "stochastic"}]
    return kind(groups, lr=0.01, **options), params  # type: ignore[call-arg]  # of both classes


def tensor_names(kind: type[MasterOptimizer]) -> str:
    return "momentum_buffer" if kind is SGD else "exp_avg"


def replace_moment(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    name = tensor_names(type(optimizer))
    optimizer.state[params[0]][name] = optimizer.state[params[0]][name] * 2


def swap_moment_data(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    moment = optimizer.state[params[2]][tensor_names(type(optimizer))]
    moment.data = moment.data.clone().mul_(-1)


def swap_weight_data(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    params[1].data = params[1].data.clone().mul_(3)


def transpose_weight_in_place(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    # square, so that only the strides differ
    params[0].data = params[0].data.t()


def replace_state(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state[params[3]] = copy.deepcopy(optimizer.state[params[3]])
    optimizer.state[params[3]][tensor_names(type(optimizer))].add_(1)


def forget_state(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state.clear()


def reload(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def climb(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups[1].update(maximize=True, lr=0.2)


def cut_weight(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    params[5].data = params[5].data[:2]
    for name, held in optimizer.state[params[5]].items():
        if name != "step":
            held.data = held.data[:2]


def reseed(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups[1]["rounding_seed"] = 7


def widen_gradients(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    params[2].grad = None
    params[2].grad_dtype = torch.float32  # type: ignore[attr-defined]  # torch 2.9 and later


def swap_groups(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups.reverse()


def exchange_parameters(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]


def nothing(optimizer: MasterOptimizer, params: list[torch.nn.Parameter]) -> None:
    """Leave everything as it is."""


DISTURBANCES = [
    nothing, replace_moment, swap_moment_data, swap_weight_data, transpose_weight_in_place, replace_state, forget_state,
    reload, climb, cut_weight, reseed, widen_gradients, swap_groups, exchange_parameters,
]  # fmt: skip


def feed(optimizer: MasterOptimizer, params: list[torch.nn.Parameter], step: int, absent: set[int]) -> None:
    generator = torch.Generator().manual_seed(step)
    for place, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.grad_dtype or p.dtype)
        p.grad = None if place in absent else grad
    optimizer.step()


def run(kind: type[MasterOptimizer], disturb: Disturb, absent_in: dict[int, set[int]], plans: bool) -> list[Tensor]:
    optimizer, params = build(kind)
    for step in range(STEPS):
        if step == STEPS // 2:
            disturb(optimizer, params)
        if not plans:
            optimizer._forget()
        feed(optimizer, params, step, absent_in.get(step, set()))
    return snapshot(optimizer)


@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_a_step_by_plan_is_the_step_without(kind: type[MasterOptimizer], disturb: Disturb) -> None:
    assert equal(run(kind, disturb, {}, plans=True), run(kind, disturb, {}, plans=False))


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_parameters_without_gradients_now_and_then(kind: type[MasterOptimizer]) -> None:
    absent = {1: {0}, 2: {0}, 3: {1, 4}, 5: {5}}
    assert equal(run(kind, nothing, absent, plans=True), run(kind, nothing, absent, plans=False))


def test_an_undisturbed_run_plans_once() -> None:
    optimizer, params = build(AdamW)
    feed(optimizer, params, 0, set())
    feed(optimizer, params, 1, set())
    kinds = [plan.batches for plan in optimizer._kept_batches.values()]
    feed(optimizer, params, 2, set())
    assert len(kinds) == 2
    assert all(plan.batches is known for plan, known in zip(optimizer._kept_batches.values(), kinds, strict=True))


def test_a_copy_plans_for_itself() -> None:
    optimizer, params = build(AdamW)
    for step in range(3):
        feed(optimizer, params, step, set())
    twin = copy.deepcopy(optimizer)
    theirs = [p for group in twin.param_groups for p in group["params"]]
    feed(optimizer, params, 3, set())
    feed(twin, theirs, 3, set())  # type: ignore[arg-type]  # parameters
    assert equal(snapshot(optimizer), snapshot(twin))
    assert params[0].data_ptr() != theirs[0].data_ptr()


def test_zero_grad_drops_or_fills_with_zeros() -> None:
    optimizer, params = build(AdamW)
    feed(optimizer, params, 0, set())
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_a_sparse_gradient_is_refused_in_any_step() -> None:
    p = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = AdamW([p], lr=0.1)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    p.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(ConfigError, match="sparse gradient"):
        optimizer.step()


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4, 4)], ids=["matrix", "channels_last"])
def test_gradients_of_another_kind_than_the_plan_met_are_read_alike(shape: tuple[int, ...]) -> None:
    class Own(torch.Tensor):
        pass

    ends = []
    for given in (lambda g: g, lambda g: torch.nn.Parameter(g, requires_grad=False), lambda g: g.as_subclass(Own)):
        weight = torch.linspace(-1, 1, math.prod(shape)).view(shape)
        p = torch.nn.Parameter(weight.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else weight.t())
        optimizer = AdamW([p], lr=0.1)
        for number in range(4):
            grad = torch.full_like(p, 0.5 - number, memory_format=torch.preserve_format).mul_(p.detach())
            p.grad = given(grad) if number > 1 else grad
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
