"""Laws of the loss scaler, held against torch's own over random runs."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loss_scale.test_unscale import unscale_

from mezzo.errors import LossScaleExhausted
from mezzo.loss_scale import GradScaler, LossScale, next_state
from mezzo.policy import ScalingConfig

CLEAN, INF, NAN = 1.0, math.inf, math.nan
steps = st.lists(st.sampled_from([CLEAN, CLEAN, CLEAN, INF, NAN]), max_size=40)
powers = st.integers(-3, 3).filter(bool).map(lambda e: 2.0 ** abs(e))
configs = st.builds(
    lambda e, g, b, n: ScalingConfig(
        init_scale=2.0**e, growth_factor=g, backoff_factor=1 / b, growth_interval=n, min_scale=0.0
    ),
    st.integers(0, 127), powers, powers, st.integers(1, 4),
)  # fmt: skip


def torch_arguments(config: ScalingConfig) -> dict[str, float]:
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    return {name: getattr(config, name) for name in names}


def run(scaler: torch.amp.GradScaler, findings: list[float]) -> list[tuple[float, int, float]]:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=2.0**-6)
    trace = []
    for factor in findings:
        optimizer.zero_grad()
        scaler.scale((param * torch.tensor(factor)).sum() * 2.0**-100).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale(), scaler._get_growth_tracker(), param.item()))
    return trace


@given(config=configs, findings=steps)
def test_scale_tracker_and_weights_are_torchs_until_the_floor(config: ScalingConfig, findings: list[float]) -> None:
    """B3: same skips, same scale, same weights, for any powers of two; growth stops below inf in both."""
    ours = GradScaler("cpu", **torch_arguments(config), min_scale=0.0, patience=None)
    theirs = torch.amp.GradScaler("cpu", **torch_arguments(config))
    assert run(ours, findings) == run(theirs, findings)


@given(
    config=configs, findings=steps, low=st.integers(-20, 0), ceiling=st.integers(0, 20), hysteresis=st.integers(1, 4)
)
def test_numbers_and_tensors_move_alike_and_within_bounds(
    config: ScalingConfig, findings: list[float], low: int, ceiling: int, hysteresis: int
) -> None:
    config = replace(
        config,
        min_scale=config.init_scale * 2.0**low,
        max_scale=config.init_scale * 2.0 ** min(ceiling, 127 - int(math.log2(config.init_scale))),
        hysteresis=hysteresis,
    )
    numbers, tensors = LossScale.start(config), LossScale.start(config, "cpu")
    in_a_row = 0
    for finding in findings:
        found = finding != CLEAN
        previous = numbers
        assert bool(tensors.is_exhausted(torch.tensor(float(found)), config, 3)) == numbers.is_exhausted(
            found, config, 3
        )
        numbers = next_state(numbers, found, config)
        tensors = next_state(tensors, torch.tensor(float(found)), config)
        assert tensors.numbers() == numbers
        assert config.min_scale <= numbers.scale <= config.max_scale
        in_a_row = in_a_row + 1 if found else 0
        assert numbers.skipped_in_a_row == in_a_row
        backed_off = numbers.scale < previous.scale
        assert backed_off == (found and in_a_row >= hysteresis and previous.scale > config.min_scale)
        assert 0 <= numbers.growth_tracker < config.growth_interval


@given(st.data())
def test_unscaling_a_scaled_gradient_is_exact_for_powers_of_two(data: st.DataObject) -> None:
    """Neither rounding nor underflow, wherever the scaled value is a normal number."""
    exponent = data.draw(st.integers(-60, 60))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64]))
    true = torch.randn(17, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).to(dtype)
    grad = true * 2.0**exponent
    found = unscale_([grad], torch.tensor(2.0**exponent))
    assert torch.equal(grad, true) and not found


numbers_from = {
    "init_scale": st.integers(3, 40).map(lambda e: 2.0**e),
    "growth_factor": st.sampled_from([1.5, 4.0]),
    "backoff_factor": st.sampled_from([0.25, 0.75]),
    "growth_interval": st.integers(1, 1999),
    "min_scale": st.sampled_from([0.0, 2.0, 4.0]),
    "max_scale": st.sampled_from([2.0**41, 2.0**50]),
    "hysteresis": st.integers(2, 5),
    "dynamic": st.just(False),
}
other_configs = st.builds(ScalingConfig, **numbers_from)


def test_every_field_of_the_config_is_drawn_off_its_default() -> None:
    assert set(numbers_from) == {field.name for field in fields(ScalingConfig)}


@given(config=other_configs, findings=steps, patience=st.none() | st.integers(30, 90))
def test_state_dict_round_trips_with_every_value_off_its_default(
    config: ScalingConfig, findings: list[float], patience: int | None
) -> None:
    """B6: state_dict, pickle and deepcopy carry everything that decides the next scale."""
    one = GradScaler("cpu", **{field.name: getattr(config, field.name) for field in fields(config)}, patience=patience)
    try:
        run(one, findings)
    except LossScaleExhausted:
        pass
    two = GradScaler("cpu")
    two.load_state_dict(one.state_dict())
    for copied in (two, pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert copied.state_dict() == one.state_dict()
        again = GradScaler("cpu")
        again.scale(torch.ones(()))  # tensors exist already
        again.load_state_dict(copied.state_dict())
        assert again.state_dict() == one.state_dict()
    assert one.state_dict()["_skipped_in_a_row"] == one.skipped_in_a_row


@given(config=configs, findings=steps, more=steps)
def test_checkpoints_go_both_ways_between_torchs_scaler_and_ours(
    config: ScalingConfig, findings: list[float], more: list[float]
) -> None:
    ours = GradScaler("cpu", **torch_arguments(config), min_scale=0.0, patience=None)
    theirs = torch.amp.GradScaler("cpu", **torch_arguments(config))
    run(ours, findings)
    run(theirs, findings)
    if theirs.get_scale() == 0.0:
        return
    from_theirs = GradScaler("cpu", min_scale=0.0, patience=None)
    from_theirs.load_state_dict(theirs.state_dict())
    from_ours = torch.amp.GradScaler("cpu")
    from_ours.load_state_dict(ours.state_dict())
    assert theirs.state_dict().items() <= ours.state_dict().items()
    assert run(from_theirs, more) == run(from_ours, more)


@given(factor=st.floats(1.01, 10.0), backoff=st.floats(0.1, 0.99), start=st.floats(2.0**10, 2.0**20), findings=steps)
def test_odd_factors_are_torchs_too(factor: float, backoff: float, start: float, findings: list[float]) -> None:
    """On the CPU to the last bit; in tensors, where the factor itself is rounded to fp32, to a rounding a move."""
    arguments = {"init_scale": start, "growth_factor": factor, "backoff_factor": backoff, "growth_interval": 2}
    config = ScalingConfig(**arguments, min_scale=0.0)
    theirs = run(torch.amp.GradScaler("cpu", **arguments), findings)
    ours = run(GradScaler("cpu", **arguments, min_scale=0.0, patience=None), findings)
    assert [scale for scale, *_ in ours] == [scale for scale, *_ in theirs]
    state, eps = LossScale.start(config, "cpu"), torch.finfo(torch.float32).eps
    for moves, (finding, (scale, tracker, _)) in enumerate(zip(findings, theirs, strict=True), start=1):
        state = next_state(state, torch.tensor(float(finding != CLEAN)), config)
        assert float(state.scale) == pytest.approx(scale, rel=moves * eps, abs=0)
        assert int(state.growth_tracker) == tracker
