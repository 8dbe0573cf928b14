"""The loss scale of a run: numbers at first, then tensors that stay where they are, and the scale that losses carry."""

from __future__ import annotations

import torch

from mezzo.loss_scale import LastStep, LossScale
from mezzo.loss_scale.scale_state import ScaleState

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
    assert float(captured.scale) == 8.0 and float(state.captured().scale) == 4.0


def test_a_tensor_of_the_callers_is_taken_as_it_is() -> None:
    state, own = on_the_cpu(), torch.tensor(2.0)
    state.adopt("scale", own, 1.0)
    assert state.tensor is own
    state.adopt("growth_tracker", torch.tensor(3.0), 1.0)
    assert int(state.state.growth_tracker) == 3 and isinstance(state.state.growth_tracker, torch.Tensor)
    assert state.state.growth_tracker.dtype is torch.int32
    state.adopt("scale", None, 16.0)
    assert state.tensor is None and state.state.scale == 16.0


def test_the_last_step_is_read_when_asked() -> None:
    last = LastStep(torch.tensor(True), on_the_cpu(8.0).captured())
    assert (last.applied, last.scale) == (False, 8.0)
    assert LastStep(False, None).scale == 1.0
    assert repr(LastStep(False, None)) == "LastStep(applied=True, scale=1)"
