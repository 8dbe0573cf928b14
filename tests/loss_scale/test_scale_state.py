"""The loss scale of a run: numbers at first, then tensors that stay where they are, and the scale that losses carry."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import LossScaleExhausted
from mezzo.loss_scale import GradScaler, LossScale
from mezzo.loss_scale.state import AsyncFlag, LastStep, ScaleState

CPU = torch.device("cpu")


def on_the_cpu(scale: float = 8.0) -> ScaleState:
    state = ScaleState(LossScale(scale=scale))
    state.to(CPU)
    return state


def test_numbers_until_there_is_a_device() -> None:
    state = ScaleState(LossScale(scale=8.0))
    assert state.tensor is None
    state.move(LossScale(scale=4.0))
    assert state.state.scale == 4.0
    state.to(CPU)
    assert state.tensor is not None and float(state.tensor) == 4.0


def test_a_move_writes_into_the_same_tensors() -> None:
    state = on_the_cpu()
    before = state.tensor
    state.move(LossScale(scale=4.0, growth_tracker=3, skipped_in_a_row=1))
    assert state.tensor is before and state.state.numbers() == LossScale(
        scale=4.0, growth_tracker=3, skipped_in_a_row=1
    )


def test_losses_keep_the_scale_that_they_were_multiplied_by() -> None:
    state = on_the_cpu()
    captured = state.captured()
    state.move(LossScale(scale=4.0))
    assert float(captured) == 8.0 and float(state.captured()) == 4.0


def test_a_tensor_of_the_callers_is_taken_as_it_is() -> None:
    state, own = on_the_cpu(), torch.tensor(2.0)
    state.assign("scale", own, 1.0)
    assert state.tensor is own
    state.assign("growth_tracker", torch.tensor(3.0), 1.0)
    assert int(state.state.growth_tracker) == 3 and isinstance(state.state.growth_tracker, torch.Tensor)
    assert state.state.growth_tracker.dtype is torch.int32
    state.assign("scale", None, 16.0)
    assert state.tensor is None and state.state.scale == 16.0


def test_the_last_step_is_read_when_asked() -> None:
    last = LastStep(torch.tensor(True), on_the_cpu(8.0).captured())
    assert (last.applied, last.scale) == (False, 8.0)
    assert LastStep(False, None).scale == 1.0
    assert repr(LastStep(False, None)) == "LastStep(applied=True, scale=1)"


def test_every_few_flags_one_is_read() -> None:
    peek = AsyncFlag(interval=3)
    assert [peek.ask(torch.tensor(True)) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert [AsyncFlag(interval=1).ask(torch.tensor(flag)) for flag in (True, False)] == [True, False]


def overflow(scaler: GradScaler, factor: float = math.inf) -> Tensor:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5, fused=True)
    scaler.scale((param * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return param.detach()


def test_exhaustion_nobody_read_is_raised_late_and_not_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """S6 for optimizers that skip on an accelerator, imitated by never taking the way that reads at once."""
    monkeypatch.setattr(
        GradScaler, "_reads", lambda scaler, verdict, at_once: scaler._exhausted_flag.ask(torch.tensor(verdict))
    )
    scaler = GradScaler("cpu", patience=2)
    scaler._exhausted_flag = AsyncFlag(interval=8)
    for _ in range(7):
        assert overflow(scaler).tolist() == [1.0, 1.0]
    with pytest.raises(LossScaleExhausted, match="8 steps in a row"):
        overflow(scaler)
    for number in range(8):
        overflow(scaler, math.inf if number < 7 else 1.0)
    assert scaler.skipped_in_a_row == 0


def test_a_verdict_that_arrives_after_the_run_recovered_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator nobody reads whether a step was skipped, and an old verdict may come with a clean step."""
    scaler, param = GradScaler("cpu"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5, fused=True)
    monkeypatch.setattr(GradScaler, "_reads", lambda scaler, verdict, at_once: True)
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        scaler._per_optimizer_states[id(optimizer)]["is_skipped"] = None
        if factor == 1.0:
            scaler.update()
        else:
            with pytest.raises(LossScaleExhausted):
                scaler.update()
    assert param.tolist() == [0.5, 0.5]
