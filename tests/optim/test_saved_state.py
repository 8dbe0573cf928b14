"""The door for a saved optimizer state: what does not fit is named, what torch and mezzo save fits."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mezzo
from mezzo.errors import CheckpointError
from mezzo.optim import MOMENTS, check_saved

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "mezzo.AdamW": lambda p: mezzo.optim.AdamW(p, master="split"),
    "mezzo.SGD": lambda p: mezzo.optim.SGD(p, momentum=0.9, master="kahan"),
    "MasterWeights": lambda p: mezzo.optim.MasterWeights(torch.optim.Adam(p), "split"),
    "torch.SGD without momentum": lambda p: torch.optim.SGD(p),
    "torch.NAdam": lambda p: torch.optim.NAdam(p),
}


def stepped(name: str, steps: int = 1) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = MAKERS[name](params)
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_was_saved_fits(name: str, steps: int) -> None:
    check_saved("optimizer", stepped(name, steps).state_dict(), stepped(name))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no groups": (lambda s: s.pop("param_groups"), "optimizer has no param_groups with params"),
    "another group": (lambda s: s["param_groups"].append({"params": []}), "2 groups with [2, 0] params"),
    "a rate of text": (lambda s: s["param_groups"][0].update(lr="fast"), "['lr'] is 'fast', and must be a number"),
    "a rate of nan": (lambda s: s["param_groups"][0].update(lr=float("nan")), "must be a finite number"),
    "a flag of 3": (lambda s: s["param_groups"][0].update(amsgrad=3), "['amsgrad'] is 3, and must be True or False"),
    "one beta": (lambda s: s["param_groups"][0].update(betas=(0.9,)), "must be 2 numbers"),
    "no state": (lambda s: s.pop("state"), "optimizer.state is NoneType, and must be a dict"),
    "a stranger's state": (lambda s: s["state"].update({7: {}}), "state[7] belongs to none of the 2 parameters"),
    "a count of text": (lambda s: s["state"][0].update(step="3"), "['step'] is '3', and must be a finite number"),
    "a moment of another shape": (lambda s: s["state"][0].update(exp_avg=torch.ones(3)), "has shape [3], and [2, 3] is wanted"),
    "a moment that is none": (lambda s: s["state"][0].update(exp_avg=None), "is None, and must be a tensor of shape [2, 3]"),
    "a moment without values": (
        lambda s: s["state"][0].update(exp_avg=torch.ones(2, 3, device="meta")), "must be one of torch.strided with values",
    ),
    "a remainder in fp32": (
        lambda s: s["state"][0].update(remainder=torch.ones(2, 3)),
        ("['remainder'] is torch.float32: steps of torch's optimizers do not keep it. "
         "Nothing was loaded. Load model and optimizer first, then call mezzo.prepare, which makes it anew."),
    ),
    "a remainder in int64": (
        lambda s: s["state"][0].update(remainder=s["state"][0]["remainder"].long()), "['remainder'] is int64[2,3] cpu, and must be int16",
    ),
    "a remainder of flags": (
        lambda s: s["state"][0].update(remainder=s["state"][0]["remainder"].bool()), "['remainder'] is bool[2,3] cpu, and must be int16",
    ),
    "a complex remainder": (
        lambda s: s["state"][0].update(remainder=torch.ones(2, 3, dtype=torch.cfloat)), "['remainder'] is complex64[2,3] cpu, and must be int16",
    ),
    "a moment missing in one": (lambda s: s["state"][1].pop("exp_avg"), "state[1] has no exp_avg, which others of its group have"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_named(change: str) -> None:
    make, message = CHANGES[change]
    optimizer = stepped("mezzo.AdamW")
    saved = copy.deepcopy(optimizer.state_dict())
    make(saved)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_saved("optimizer", saved, optimizer)


def test_a_compensation_that_no_step_takes_is_named() -> None:
    p = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    optimizer = mezzo.optim.AdamW([p], master="kahan")
    p.grad = torch.ones_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["compensation"] = saved["state"][0]["compensation"].double()
    with pytest.raises(CheckpointError, match=re.escape("is fp64[2,3] cpu, and must be bf16")):
        check_saved("optimizer", saved, optimizer)


def test_a_sum_of_squares_missing_in_one_is_named() -> None:
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2)) for _ in range(2)])
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]["sum"]
    with pytest.raises(CheckpointError, match="has no sum, which others of its group have"):
        check_saved("optimizer", saved, optimizer)


@pytest.mark.parametrize("state", [{"a": 1}, {0: {"a": 1}, 1: {"a": 1}}])
def test_what_the_inner_optimizer_stumbles_over_leaves_it_as_it_was(state: dict[Any, Any]) -> None:
    optimizer = mezzo.optim.MasterWeights(
        torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2).bfloat16()) for _ in "ab"]), "split"
    )
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="is refused by Adagrad"):
        optimizer.load_state_dict({**before, "state": state})
    now = optimizer.state_dict()
    torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)
    assert now["param_groups"] == before["param_groups"]
    optimizer.step()


@pytest.mark.parametrize(
    "kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master"])
def test_a_moment_that_is_sparse_is_refused_where_torch_steps_dense_ones(kind: Any, policy: str) -> None:
    def take(amp: mezzo.Stepper) -> None:
        amp.zero_grad()
        amp.backward(amp.model(torch.ones(3, 4)).square().mean())
        assert amp.step()

    model = torch.nn.Linear(4, 1)
    amp = mezzo.prepare(model, kind(model.parameters(), lr=0.1), policy)
    take(amp)
    saved = copy.deepcopy(amp.state_dict())
    entry = saved["optimizers"][0]["state"][0]
    name = next(name for name, value in entry.items() if name in MOMENTS | {"sum"} and isinstance(value, Tensor))
    entry[name] = entry[name].to_sparse()
    with pytest.raises(CheckpointError, match=f"{name}.*sparse"):
        amp.load_state_dict(saved)
    take(amp)


@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
def test_a_momentum_that_is_sparse_is_for_sgd_alone(policy: str) -> None:
    """RMSprop's next step ended in torch's words."""
    model = torch.nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9), policy)
    amp.backward(model(torch.ones(3, 4)).square().mean())
    assert amp.step()
    saved = copy.deepcopy(amp.state_dict())
    entry = saved["optimizers"][0]["state"][0]
    entry["momentum_buffer"] = entry["momentum_buffer"].to_sparse()
    with pytest.raises(CheckpointError, match=r"\['momentum_buffer'\] is a tensor of torch.sparse_coo"):
        amp.load_state_dict(saved)


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (torch.optim.ASGD, {}, "ax"), (torch.optim.Rprop, {}, "prev"), (torch.optim.Adadelta, {}, "acc_delta"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg"), (torch.optim.RAdam, {}, "step"),
        (torch.optim.Adafactor, {}, "row_var"), (torch.optim.Adafactor, {}, "variance"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
def test_what_a_step_of_torch_reads_is_asked_for_in_every_entry(
    kind: Any, options: Any, name: str, policy: str
) -> None:
    model = torch.nn.Linear(3, 2)
    amp = mezzo.prepare(model, kind(model.parameters(), **options), policy)
    amp.backward(model(torch.ones(4, 3)).square().mean())
    amp.step()
    saved = amp.state_dict()
    amp.load_state_dict(saved)
    for entry in saved["optimizers"][0]["state"].values():
        entry.pop(name, None)
    with pytest.raises(CheckpointError, match=rf"state\[\d\] has no {name}, which a step of {kind.__name__} reads"):
        amp.load_state_dict(saved)


@pytest.mark.parametrize("count", [torch.ones(3), math.nan, -1.0, "x"], ids=str)
def test_a_count_of_rounded_steps_is_one_number(count: Any) -> None:
    p = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    optimizer = mezzo.optim.MasterWeights(torch.optim.Adamax([p]), "stochastic")
    p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    saved["state"][0]["rounding_step"] = count
    with pytest.raises(CheckpointError, match=r"state\[0\]\['rounding_step'\] is .*must be a finite number from 0"):
        optimizer.load_state_dict(saved)
