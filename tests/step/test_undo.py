"""A step that is taken and undone leaves no trace of itself; one that is kept is torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.step_models import wait_for_nothing
from torch import Tensor
from torch.optim import Optimizer

import mezzo
from mezzo.optim import MasterWeights
from mezzo.step.buffers import Buffers
from mezzo.step.undo import Attempt, can_be_undone, choose_, copies_of

Make = Callable[[list[Tensor]], Optimizer]
KINDS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "masters": lambda p: MasterWeights(torch.optim.Rprop(p, lr=0.1), "fp32"),
}


def everything(optimizer: Optimizer, params: list[Tensor]) -> dict[str, Any]:
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = {i: dict(optimizer.state[p]) for i, p in enumerate(params) if p in optimizer.state}
    return copy.deepcopy({"params": [p.detach() for p in params], "options": options, "state": state})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def made(kind: str, steps: int) -> tuple[Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    params: list[Tensor] = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4))]
    optimizer = KINDS[kind](params)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    for p in params:
        p.grad = torch.randn_like(p)
    return optimizer, params


@pytest.mark.parametrize("steps", [0, 2], ids=["first", "third"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_skipped", [True, False])
def test_a_step_is_undone_where_it_must_be(kind: str, steps: int, is_skipped: bool) -> None:
    optimizer, params = made(kind, steps)
    twin, twins = made(kind, steps)
    assert can_be_undone(optimizer)
    before = everything(optimizer, params)
    attempt = Attempt(optimizer, params, torch.tensor(float(is_skipped)))
    optimizer.step()
    undo = attempt.finish()
    if is_skipped:
        if undo is not None:
            undo()
        assert same(everything(optimizer, params), before)
        optimizer.step()
    twin.step()
    assert same(everything(optimizer, params), everything(twin, twins))


class Foreign(torch.optim.SGD):
    """Somebody's own."""


class Counting(torch.optim.SGD):
    """With a state that is none of tensors."""

    __module__ = "torch.optim.counting"

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, lr)
        self.seen: set[int] = set()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Foreign(p, lr=0.1),
        lambda p: Counting(p, lr=0.1),
        lambda p: MasterWeights(torch.optim.RMSprop(p, lr=0.1), "stochastic"),
        lambda p: torch.optim.SGD([p[0], torch.nn.Parameter(torch.ones(2, device="meta"))], lr=0.1),
    ],
    ids=["another's", "a set in its state", "stochastic masters", "two devices"],
)
def test_what_cannot_be_copied_is_not_attempted(make: Make) -> None:
    assert not can_be_undone(make([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]))


@pytest.mark.parametrize("steps", [0, 2], ids=["first", "third"])
@pytest.mark.parametrize("kind", ["rmsprop", "adamax", "nadam"])
def test_a_step_that_ends_in_an_error_is_taken_back_though_nothing_bad_was_found(
    kind: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_nothing(monkeypatch)
    model = torch.nn.Linear(4, 2)
    amp = mezzo.prepare(model, KINDS[kind](list(model.parameters())), "fp32")
    for _ in range(steps):
        amp.backward(model(torch.ones(3, 4)).square().mean())
        amp.step()
        amp.zero_grad()
    (optimizer,), params = amp.optimizers, list(model.parameters())
    optimizer.param_groups[0]["eps"] = torch.ones(3)  # read when the moments have moved
    before = everything(optimizer, params)
    amp.backward(model(torch.ones(3, 4)).square().mean())
    with pytest.raises(RuntimeError):
        amp.step()
    assert same(everything(optimizer, params), before)


def many() -> list[Tensor]:
    return [
        torch.randn(3, 4),
        torch.randn(2, 6).t(),
        torch.tensor(2.5),
        torch.empty(0),
        torch.randn(5).bfloat16(),
        torch.arange(4),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.randn(2, 2)),
    ]


def test_copies_have_values_dtype_and_strides_and_share_no_memory() -> None:
    expanded = torch.randn(3, 1, 4).expand(2, 3, 5, 4)  # held once, as masks of all heads are
    tensors = [*many(), expanded, expanded.mT]
    for copied, tensor in zip(copies_of(tensors), tensors, strict=True):
        assert torch.equal(copied, tensor)
        assert copied.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        assert (copied.dtype, copied.stride()) == (tensor.dtype, tensor.stride())
        assert not copied.requires_grad
        assert copied.numel() == 0 or copied.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("large", [1, 2**18], ids=["one launch each", "one for all"])
@pytest.mark.parametrize("void", [True, torch.tensor(True), torch.tensor(False)])
def test_old_values_come_back_where_the_step_is_void(
    void: Tensor | bool, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mezzo.step.undo._LARGE", large)
    old, now = many(), many()
    was, new = copies_of(old), copies_of(now)
    choose_(list(zip(old, now, strict=True)), void)
    for tensor, want in zip(now, was if void else new, strict=True):
        assert torch.equal(tensor, want)


def test_entries_of_the_state_that_a_step_fills_hold_afterwards_what_they_held() -> None:
    optimizer, params = made("momentum", 0)
    optimizer.state[params[0]], optimizer.state[params[1]] = {"momentum_buffer": None}, {"name": "mine"}
    before = everything(optimizer, params)
    attempt = Attempt(optimizer, params, torch.ones(()))
    optimizer.step()
    assert all(isinstance(optimizer.state[p]["momentum_buffer"], Tensor) for p in params)
    undo = attempt.finish()
    assert undo is not None
    undo()
    assert same(everything(optimizer, params), before)


def test_nothing_is_chosen_among_nothing() -> None:
    assert copies_of([]) == []
    choose_([], True)


@pytest.mark.parametrize("void", [True, torch.tensor(1.0), torch.tensor(0.0)], ids=["host", "void", "healthy"])
def test_statistics_that_are_taken_back_leave_the_graphs_of_other_losses_whole(void: bool | Tensor) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    twin, buffers, x = copy.deepcopy(model), Buffers(model), torch.randn(8, 4)
    for net in (model, twin):
        note = buffers.begin() if net is model else None
        fake = net(x)
        if note is not None:
            note(fake)
            before = buffers.copies()["1.running_mean"].value
            buffers.settle(void)
        fake.square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    want = before if void else twin[1].running_mean
    assert torch.equal(model[1].running_mean, want)
    assert torch.equal(buffers.copies()["1.running_mean"].value, want)


def test_a_generator_learns_from_what_it_made_before_a_step_of_its_critic_was_skipped() -> None:
    torch.manual_seed(0)
    maker, judge = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)), torch.nn.Linear(8, 1)
    of_maker, of_judge = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (maker, judge))
    amp = mezzo.prepare(torch.nn.ModuleList([maker, judge]), [of_maker, of_judge], "fp16, scaling.init_scale=1024")
    for is_taken in (False, True):
        of_judge.zero_grad()
        amp.backward(judge(torch.randn(8, 8)).mean() * (1.0 if is_taken else 1e30))
        fake = maker(torch.randn(8, 4))
        amp.backward(judge(fake.detach()).mean())
        assert bool(amp.step(optimizer=of_judge)) is is_taken
        of_maker.zero_grad()
        amp.backward(-judge(fake).mean())
        amp.step(optimizer=of_maker)


@pytest.mark.parametrize("is_made_first", [False, True])
def test_bad_batches_of_two_networks_in_turn_are_skipped_one_by_one(is_made_first: bool) -> None:
    """Whichever loss sees them first, and though the second is run again for its cause while the maker's graph waits."""
    torch.manual_seed(0)
    maker, judge = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)), torch.nn.Linear(8, 1)
    of_maker, of_judge = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (maker, judge))
    amp = mezzo.prepare(torch.nn.ModuleList([maker, judge]), [of_maker, of_judge], "bf16")
    for index in range(7):
        is_bad = index in (2, 4, 5)
        z = torch.full((8, 4), float("nan")) if is_bad else torch.randn(8, 4)
        of_judge.zero_grad()
        fake = maker(z) if is_made_first else None
        amp.backward(judge(torch.randn(8, 8)).mean())
        fake = maker(z) if fake is None else fake
        amp.backward(judge(fake.detach()).mean())
        assert bool(amp.step(optimizer=of_judge)) is not is_bad
        of_maker.zero_grad()
        amp.backward(-judge(fake).mean())
        assert bool(amp.step(optimizer=of_maker)) is not is_bad
        assert maker[1].running_mean.isfinite().all()
