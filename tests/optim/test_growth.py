"""What masters take of Python grows with the number of parameters, not with its square."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pytest
import torch
from torch import nn

from mezzo.optim import AdamW, MasterWeights


def made(kind: str, count: int) -> AdamW | MasterWeights:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3).bfloat16()) for _ in range(count)]
    one = AdamW(params, master="split") if kind == "own" else MasterWeights(torch.optim.NAdam(params), "split")
    one.set_masters_({p: p.detach().float() for p in params})
    for p in params:
        p.grad = torch.ones(3).bfloat16()
    one.step()
    return one


def calls(action: Callable[[], object]) -> int:
    found = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal found
        found += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


ACTIONS: dict[str, Callable[[AdamW | MasterWeights], object]] = {
    "step": lambda one: one.step(),
    "load_state_dict": lambda one: one.load_state_dict(one.state_dict()),
    "masters": lambda one: [one.master(p) for group in one.param_groups for p in group["params"]],
}


@pytest.mark.parametrize(
    ("kind", "action"), [("around", "step"), ("around", "load_state_dict"), ("around", "masters"), ("own", "step")]
)
def test_four_times_the_parameters_take_four_times_the_calls(kind: str, action: str) -> None:
    few, many = (calls(partial(ACTIONS[action], made(kind, count))) for count in (50, 200))
    assert many <= 1.2 * 4 * few


class Counted(list[nn.Parameter]):
    """Counts the parameters that were looked at."""

    seen = 0

    def __iter__(self) -> Iterator[nn.Parameter]:
        for param in super().__iter__():
            self.seen += 1
            yield param


@pytest.mark.parametrize("master", ["split", "none"])
def test_a_first_step_looks_at_each_parameter_a_few_times(master: str) -> None:
    dtype = torch.float32 if master == "none" else torch.bfloat16
    one = AdamW([nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(100)], master=master)
    for p in one.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    gc.collect()  # steppers of other tests look at who steps
    one.param_groups[0]["params"] = params = Counted(one.param_groups[0]["params"])
    one.step()
    assert params.seen < 20 * len(params)
