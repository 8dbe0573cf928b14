"""The rule by which the scale moves, without a scaler or a gradient."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.loss_scale import LossScale, move_, next_state
from mezzo.policy import ScalingConfig

CONFIG = ScalingConfig(growth_interval=3)


def after(findings: str, config: ScalingConfig = CONFIG, **start: Any) -> LossScale:
    """Run a string of steps, "." clean and "x" non-finite."""
    state = LossScale(**{"scale": config.init_scale, **start})
    for finding in findings:
        state = next_state(state, finding == "x", config)
    return state


@pytest.mark.parametrize(
    ("findings", "scale", "tracker", "skipped"),
    [
        ("", 65536.0, 0, 0),
        ("..", 65536.0, 2, 0),
        ("...", 131072.0, 0, 0),
        ("x", 32768.0, 0, 1),
        ("xx", 16384.0, 0, 2),
        ("..x..", 32768.0, 2, 0),
        ("..x...", 65536.0, 0, 0),
    ],
)
def test_backs_off_at_once_and_grows_after_the_interval(
    findings: str, scale: float, tracker: int, skipped: int
) -> None:
    """B3."""
    assert after(findings) == LossScale(scale=scale, growth_tracker=tracker, skipped_in_a_row=skipped)


def test_hysteresis_bears_some_non_finite_steps_in_a_row() -> None:
    config = dataclasses.replace(CONFIG, hysteresis=3)
    assert after("xx", config).scale == 65536.0
    assert after("xxx", config).scale == 32768.0
    assert after("xxxx", config).scale == 16384.0
    assert after("xx.xx", config).scale == 65536.0  # a clean step starts the count anew
    assert after("..xx.", config).growth_tracker == 1  # a tolerated step still ends the clean run


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        ScalingConfig(init_scale=4.0, min_scale=3.0, max_scale=10.0, growth_interval=2),
        ScalingConfig(init_scale=2.0**126, growth_interval=1),  # one growth is left
        ScalingConfig(init_scale=8.0, growth_factor=1.0, min_scale=0.0, growth_interval=2),
    ],
)
def test_in_place_it_moves_alike(config: ScalingConfig) -> None:
    """Over every run of six steps that are clean, non-finite, or skipped for another reason."""
    for findings in itertools.product(".x-", repeat=6):
        state, wanted = LossScale.start(config, "cpu"), LossScale.start(config)
        for finding in findings:
            move_(state, torch.tensor(float(finding == "x")), torch.tensor(float(finding != ".")), config)
            wanted = wanted if finding == "-" else next_state(wanted, finding == "x", config)
            assert state.numbers() == wanted, findings


def test_floor_and_ceiling_hold() -> None:
    config = ScalingConfig(init_scale=4.0, min_scale=3.0, max_scale=10.0, growth_interval=1)
    assert after("x", config).scale == after("xxx", config).scale == 3.0
    assert after("..", config).scale == after("...", config).scale == 10.0


@pytest.mark.parametrize("device", [None, "cpu"])
def test_growth_stops_below_inf(device: str | None) -> None:
    config = ScalingConfig(init_scale=2.0**126, growth_interval=1)
    state = LossScale.start(config, device)
    for _ in range(3):
        state = next_state(state, False, config)
    assert float(state.scale) == 2.0**127


def test_a_lower_interval_takes_hold_although_the_tracker_is_past_it() -> None:
    """torch compares for equality, so that a scaler whose interval was lowered in time never grows again."""
    assert after(".", dataclasses.replace(CONFIG, growth_interval=2), growth_tracker=7).scale == 131072.0


@pytest.mark.parametrize(
    ("state", "found", "patience", "want"),
    [
        (LossScale(scale=1.0), True, None, True),
        (LossScale(scale=1.0), False, None, False),
        (LossScale(scale=2.0), True, None, False),
        (LossScale(scale=0.5), True, None, True),
        (LossScale(scale=8.0, skipped_in_a_row=3), True, 4, True),
        (LossScale(scale=8.0, skipped_in_a_row=3), False, 4, False),
        (LossScale(scale=8.0, skipped_in_a_row=3), True, 5, False),
        (LossScale(scale=8.0, skipped_in_a_row=10**6), True, None, False),
    ],
)
def test_exhausted_at_the_floor_or_when_patience_ends(
    state: LossScale, found: bool, patience: int | None, want: bool
) -> None:
    assert state.is_exhausted(found, CONFIG, patience) is want
    verdict = state.to("cpu").is_exhausted(torch.tensor(float(found)), CONFIG, patience)
    assert isinstance(verdict, Tensor) and verdict.dtype is torch.bool and bool(verdict) is want


def test_hysteresis_counts_at_the_floor_too() -> None:
    config = dataclasses.replace(CONFIG, hysteresis=2)
    assert not LossScale(scale=1.0).is_exhausted(True, config, None)
    assert LossScale(scale=1.0, skipped_in_a_row=1).is_exhausted(True, config, None)


def test_the_state_before_is_left_alone() -> None:
    state = LossScale.start(CONFIG, "cpu")
    next_state(state, torch.tensor(1.0), CONFIG)
    assert state.numbers() == LossScale(scale=65536.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.scale = 1.0  # type: ignore[misc]


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func)
        out = func(*args, **(kwargs or {}))
        assert not (isinstance(out, Tensor) and out.dtype is torch.float64), func
        return out


def test_a_move_on_a_device_reads_nothing_back_and_needs_no_fp64() -> None:
    """Values that are nowhere cannot be read: `meta` raises at the first try."""
    state = LossScale.start(CONFIG, "meta")
    with NoReads():
        state = next_state(state, torch.ones((), device="meta"), CONFIG)
        state.is_exhausted(torch.ones((), device="meta"), CONFIG, 3)
    assert (state.scale.dtype, state.growth_tracker.dtype, state.skipped_in_a_row.dtype) == (  # type: ignore[union-attr]
        torch.float32, torch.int32, torch.int32,
    )  # fmt: skip


def test_multiply_keeps_the_graph() -> None:
    loss = torch.tensor(3.0, requires_grad=True)
    for state in (LossScale(scale=4.0), LossScale(scale=4.0).to("cpu")):
        (gradient,) = torch.autograd.grad(state.multiply(loss), loss)
        assert gradient.item() == 4.0


@pytest.mark.parametrize("limit", [2**31 - 1, 2**31, 2**40, 2**63 - 1])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_limit_beyond_int32_is_one_that_no_counter_reaches(limit: int, found: float) -> None:
    config = ScalingConfig(init_scale=2.0, min_scale=2.0, growth_interval=limit, hysteresis=limit)
    state, there = LossScale.start(config), LossScale.start(config, "cpu")
    assert not there.is_exhausted(torch.tensor(found), config, limit)
    assert next_state(there, torch.tensor(found), config).numbers() == next_state(state, found, config)
    assert next_state(state, found, config).scale == 2.0
