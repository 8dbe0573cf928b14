"""What is refused of a gradient, by what the tracker has marked it as: each cell beside what torch would do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import ScalerError
from mezzo.loss_scale import messages
from mezzo.loss_scale.grad_tracker import GradTracker, Mark

Edit = Callable[[Tensor], object]


def book(*marks: Mark | None, num_steps: int = 0) -> tuple[GradTracker, torch.optim.Optimizer, list[nn.Parameter]]:
    """Return a tracker, and an optimizer whose gradients are marked so; None leaves one without a gradient."""
    tracker, params = GradTracker(), [nn.Parameter(torch.ones(2)) for _ in marks]
    tracker.passes, tracker.captured = 1, torch.tensor(8.0)
    optimizer = torch.optim.SGD(params)
    for param, mark in zip(params, marks, strict=True):
        if mark is not None:
            param.grad = torch.ones(2)
            tracker.write(torch.optim.SGD([param]), mark)
    tracker.write(torch.optim.SGD([nn.Parameter(torch.ones(1))]), Mark.SCALED)
    for _ in range(num_steps):
        tracker.next_iteration()
    return tracker, optimizer, params


def refusal(check: Callable[[GradTracker, torch.optim.Optimizer], object], *args: object) -> str | None:
    try:
        check(*args)  # type: ignore[arg-type]  # a tracker and an optimizer
    except ScalerError as error:
        return str(error)
    return None


def start(verdict: str) -> str:
    """Return the part of a verdict before the names."""
    return verdict.partition("{")[0]


KEEP: Edit = lambda grad: None  # noqa: E731
DOUBLE: Edit = lambda grad: grad.mul_(2)  # noqa: E731
ZERO: Edit = lambda grad: grad.zero_()  # noqa: E731
SPOIL: Edit = lambda grad: grad.fill_(math.nan)  # noqa: E731


@pytest.mark.parametrize(
    "mark, edit, num_steps, verdict",
    [
        (Mark.SCALED, KEEP, 0, None),
        (Mark.SCALED, DOUBLE, 0, messages.EDITED),
        (Mark.SCALED, SPOIL, 0, None),  # its step is skipped either way
        (Mark.MIXED, KEEP, 0, messages.MIXED),
        (Mark.UNSCALED, KEEP, 0, messages.TWICE),
        (Mark.UNSCALED, KEEP, 1, messages.STALE),
        (Mark.UNSCALED, ZERO, 1, None),
    ],
)
def test_before_unscale(mark: Mark, edit: Edit, num_steps: int, verdict: str | None) -> None:
    tracker, optimizer, (param,) = book(mark, num_steps=num_steps)
    assert param.grad is not None
    edit(param.grad)
    tracker.has_loose_ends = True  # what is unknown is left alone
    said = refusal(GradTracker.before_unscale, tracker, optimizer)
    assert (said is None) if verdict is None else (said is not None and start(verdict) in said)


def test_zeros_beside_scaled_gradients_are_harmless_and_alone_are_not() -> None:
    tracker, optimizer, params = book(Mark.SCALED, Mark.SCALED)
    assert params[0].grad is not None and params[1].grad is not None
    params[0].grad.zero_()
    assert refusal(GradTracker.before_unscale, tracker, optimizer) is None
    params[1].grad.zero_()
    said = refusal(GradTracker.before_unscale, tracker, optimizer)
    assert said is not None and start(messages.EDITED) in said


def test_gradients_that_are_written_as_they_were_carry_their_scale() -> None:
    tracker, optimizer, params = book(Mark.SCALED, Mark.SCALED)
    nn.utils.clip_grad_norm_(params, math.inf)
    assert tracker.before_unscale(optimizer)


@pytest.mark.parametrize("passes, loose, is_refused", [(0, False, True), (1, False, False), (0, True, False)])
def test_gradients_that_nobody_saw(passes: int, loose: bool, is_refused: bool) -> None:
    tracker, optimizer, (param,) = book(None)
    param.grad = torch.ones(2)
    tracker.passes, tracker.has_loose_ends = passes, loose
    said = refusal(GradTracker.before_unscale, tracker, optimizer)
    assert (said is not None and start(messages.UNSEEN) in said) is is_refused


@pytest.mark.parametrize(
    "mark, edit, step, direct",
    [
        (Mark.UNSCALED, KEEP, None, None),
        (Mark.SCALED, KEEP, messages.ADDED, messages.DIRECT),
        (Mark.MIXED, KEEP, messages.ADDED, messages.DIRECT),
        (Mark.SCALED, DOUBLE, messages.ADDED, None),
        (Mark.SCALED, ZERO, None, None),
    ],
)
def test_before_a_step_of_the_scaler_and_before_a_direct_one(
    mark: Mark, edit: Edit, step: str | None, direct: str | None
) -> None:
    tracker, optimizer, (param,) = book(mark)
    assert param.grad is not None
    edit(param.grad)
    for check, verdict in ((GradTracker.check_unscaled, step), (GradTracker.before_step, direct)):
        said = refusal(check, tracker, optimizer)
        assert (said is None) if verdict is None else (said is not None and said.startswith("1 of the 1 gradients"))
        assert said is None or start(verdict or "").partition(" and ")[0] in said


@pytest.mark.parametrize("check", [GradTracker.before_unscale, GradTracker.check_unscaled, GradTracker.before_step])
def test_nothing_is_judged_where_something_went_unseen(check: Callable[..., object]) -> None:
    tracker, optimizer, (param,) = book(Mark.MIXED)
    assert param.grad is not None
    tracker.is_blind = True
    assert refusal(check, tracker, optimizer) is None


def test_the_scalers_own_step_is_not_a_direct_one() -> None:
    tracker, optimizer, _ = book(Mark.SCALED)
    tracker.is_stepping = True
    assert refusal(GradTracker.before_step, tracker, optimizer) is None
