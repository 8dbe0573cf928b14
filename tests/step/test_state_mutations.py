"""Saved states changed at random: each is loaded and trains on, or is refused in a sentence of mezzo's, with nothing changed."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.step.step_models import Net, assert_same, batch, everything, mse
from tests.torch_versions import ADAGRAD_STARTS_LATE

import mezzo
from mezzo.errors import ConfigError, MezzoError

Path = tuple[Any, ...]
VALUES: tuple[Any, ...] = (
    None, "text", -1, 3, float("nan"), float("inf"), True, [], {}, (), object(), torch.ones(2), torch.ones(()), torch.ones(1, 8).long(),
    torch.ones(8, device="meta"), torch.full((8,), float("nan")), torch.ones(4, 4).to_sparse(), torch.nn.Linear(1, 1), {"a": 1}, b"bytes",
)  # fmt: skip
FP16 = "fp16-master, scaling.init_scale=16, master=fp32"
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "mezzo.AdamW": lambda p: mezzo.optim.AdamW(p, lr=0.01, backend="reference"),
    "mezzo.SGD": lambda p: mezzo.optim.SGD(p, lr=0.01, momentum=0.9, backend="reference"),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "torch.NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "torch.Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "torch.RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "torch.RMSprop plain": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "torch.SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "torch.Adadelta": lambda p: torch.optim.Adadelta(p),
    "torch.Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "torch.ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "torch.Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def step(amp: mezzo.Stepper) -> bool:
    x, y = batch()
    amp.zero_grad()
    amp.backward(mse(amp.model(x), y))
    return bool(amp.step())


def made(name: str, policy: str) -> mezzo.Stepper:
    torch.manual_seed(0)
    model = Net()
    amp = mezzo.prepare(model, MAKERS[name](model.parameters()), policy)
    step(amp)
    return amp


def paths(state: Any, above: Path = ()) -> Iterator[Path]:
    """Every key of a saved state, and its own."""
    yield above
    inside = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    for key, value in inside:
        yield from paths(value, (*above, key))


def changed(state: Any, path: Path, value: Any) -> Any:
    """Return a state with one value in the place of another, or without it where the value is `Ellipsis`."""
    if not path:
        return value
    key, *way = path
    items = dict(state) if isinstance(state, dict) else dict(enumerate(state))
    items[key] = changed(items[key], tuple(way), value)
    if items[key] is ...:
        del items[key]
    return items if isinstance(state, dict) else type(state)(items.values())


def check(load: Callable[[Any], object], amp: mezzo.Stepper, state: Any, path: Path, value: Any) -> bool:
    """Load a changed state; return whether it was refused."""
    before, counters, scale = everything(amp), amp.counters(), amp.scale
    groups = copy.deepcopy([[(k, g[k]) for k in g if k != "params"] for o in amp.optimizers for g in o.param_groups])
    try:
        load(changed(state, path, value))
    except MezzoError as error:
        assert len(str(error)) > 20, error
        assert_same(everything(amp), before)
        assert (amp.counters(), amp.scale) == (counters, scale)
        now = [[(k, g[k]) for k in g if k != "params"] for o in amp.optimizers for g in o.param_groups]
        assert str(now) == str(groups)
        return True
    return False


def is_refused(load: Callable[[Any], object], amp: mezzo.Stepper, state: Any, path: Path, value: Any) -> bool:
    """As `check`, and what was taken is trained on, or stopped in a sentence."""
    try:
        if check(load, amp, state, path, value):
            return True
        with contextlib.suppress(MezzoError):
            step(amp)
    except Exception as error:
        raise AssertionError(f"{path} = {value!r}: {type(error).__name__}: {error}") from error
    return False


@pytest.mark.parametrize("policy", ["bf16-master", FP16])
@pytest.mark.filterwarnings("ignore:.*(nested|quantiz)")  # of what is made here
def test_tensors_that_are_no_plain_ones_are_refused(policy: str) -> None:
    amp = made("torch.AdamW", policy)
    given = copy.deepcopy(amp.state_dict())
    odd = torch.nested.nested_tensor([torch.ones(2)]), torch.quantize_per_tensor(torch.ones(8, 4), 0.1, 0, torch.qint8)
    for path in [("model", next(iter(given["model"]))), *[("optimizers", 0, "state", 0, key) for key in given["optimizers"][0]["state"][0]]]:  # fmt: skip
        assert all(is_refused(amp.load_state_dict, amp, given, path, value) for value in odd), path
    for value in odd:
        is_refused(amp.load_state_dict, amp, given, ("optimizers", 0, "param_groups", 0, "foreach"), value)


def test_betas_of_tensors_are_in_their_range() -> None:
    amp = made("mezzo.AdamW", "bf16-master")
    given = copy.deepcopy(amp.state_dict())
    assert not check(
        amp.load_state_dict, amp, given, ("optimizers", 0, "param_groups", 0, "betas", 1), torch.tensor(2**40)
    )
    with pytest.raises(ConfigError, match="two finite numbers"):
        step(amp)


@pytest.mark.parametrize("name", list(MAKERS)[:4])
@pytest.mark.parametrize("what", ["amp", "optimizer"])
def test_it_loads_or_is_refused_in_a_sentence(what: str, name: str) -> None:
    rng, policy = random.Random(f"{what} {name}"), "bf16-master" if name.startswith("mezzo") else FP16
    amp, other = made(name, policy), made(name, policy)
    step(other)
    given: Any = copy.deepcopy((other if what == "amp" else other.optimizers[0]).state_dict())
    every, refused = list(paths(given)), 0
    for _ in range(25):
        path = rng.choice(every)
        value = ... if path and rng.random() < 0.3 else rng.choice(VALUES)
        if is_refused((amp if what == "amp" else amp.optimizers[0]).load_state_dict, amp, given, path, value):
            refused += 1
        else:
            amp = made(name, policy)
    assert refused >= 5


NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, True, None, 10**400, -(10**30), 2**62, 1e300, -1e38, float("nan"), 1e-60, 3.5, [0.5],
)  # fmt: skip


def numbers(state: Any) -> list[Path]:
    """The numbers of a saved state, counts in tensors and flags among them; of parameters' states those of the first."""
    one = [p for p in paths(state) if "state" not in p or p[p.index("state") + 1 :][:1] in ((), (0,))]
    found = [(path, functools.reduce(lambda at, key: at[key], path, state)) for path in one]
    return [
        path for path, value in found
        if "params" not in path and "model" not in path and (isinstance(value, int | float) or (path[-1:] == ("step",)))
    ]  # fmt: skip


ALL_PAIRS = ("torch.AdamW", "mezzo.AdamW")
"""Optimizers whose every number takes every value under every policy; those of the others take turns at the policies."""


@pytest.mark.parametrize(
    ("name", "is_whole"),
    [
        *((name, name in ALL_PAIRS) for name in MAKERS),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in MAKERS if name not in ALL_PAIRS),
    ],
)
@pytest.mark.filterwarnings("ignore:Casting complex values")  # torch's ASGD, of roots at a negative rate
def test_every_number_is_loaded_and_trains_or_is_refused(name: str, is_whole: bool) -> None:
    if name == "torch.Adagrad" and not ADAGRAD_STARTS_LATE:
        pytest.skip("torch 2.11: its Adagrad takes a step count that is a plain number only where all are")
    policies = (FP16, "fp16") if name.startswith("torch") else ("bf16-master",)
    for turn, policy in enumerate(policies):
        amp = made(name, policy)
        given = copy.deepcopy(amp.state_dict())

        def load(state: Any, amp: mezzo.Stepper = amp) -> None:
            amp.load_state_dict(copy.deepcopy(state))  # torch's optimizers write what they loaded

        # What lies outside of the optimizers is read alike whichever they are.
        read = [path for path in numbers(given) if "optimizers" in path or name in ALL_PAIRS]
        for index, (path, value) in enumerate(itertools.product(read, NUMBERS)):
            is_turn = (index // len(NUMBERS) + index) % len(policies) == turn
            if (is_whole or is_turn) and not is_refused(load, amp, given, path, value):
                load(given)
