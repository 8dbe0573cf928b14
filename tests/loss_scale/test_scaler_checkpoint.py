"""Saving and resuming a run with its scaler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.messages import message_of
from tests.saved import through_a_file
from torch import Tensor, nn

from mezzo.errors import CheckpointError
from mezzo.loss_scale import GradScaler

HALF, END = 5, 10
STATE = {
    "scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 3,
    "min_scale": 2.0, "max_scale": 4096.0, "hysteresis": 3, "patience": 9, "dynamic": False, "_skipped_in_a_row": 2,
}  # fmt: skip


class Run:
    """A model, its optimizer and a scaler, with overflows at fixed steps."""

    def __init__(self, scaler: torch.amp.GradScaler, overflows: tuple[int, ...] = ()) -> None:
        torch.manual_seed(2)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.125)
        self.scaler = scaler
        self.overflows = overflows

    def train(self, steps: range) -> Tensor:
        for number in steps:
            torch.manual_seed(number)
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 3)).pow(2).mean() * (math.inf if number in self.overflows else 1.0)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])

    def saved(self) -> dict[str, Any]:
        return through_a_file({part: getattr(self, part).state_dict() for part in ("model", "optimizer", "scaler")})

    def load(self, saved: dict[str, Any], *parts: str) -> None:
        for part in parts:
            getattr(self, part).load_state_dict(saved[part])


def test_a_resumed_run_is_the_run_that_never_stopped() -> None:
    """B6; the file is read with weights_only."""
    whole = Run(GradScaler("cpu", growth_interval=3), overflows=(2, 4, 6))
    want = whole.train(range(END))
    first = Run(GradScaler("cpu", growth_interval=3), overflows=(2, 4, 6))
    first.train(range(HALF))
    second = Run(GradScaler("cpu"), overflows=(2, 4, 6))
    second.load(first.saved(), "model", "optimizer", "scaler")
    assert torch.equal(second.train(range(HALF, END)), want)
    assert second.scaler.state_dict() == whole.scaler.state_dict()
    assert whole.scaler.get_scale() != 65536.0


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_amp_may_be_switched_on_or_off_at_a_checkpoint(before: bool, after: bool) -> None:
    """B6: without AMP before, a fresh scaler; without AMP after, the saved scaler is ignored."""
    want = Run(GradScaler("cpu", enabled=False)).train(range(END))
    first = Run(GradScaler("cpu", enabled=before))
    first.train(range(HALF))
    second = Run(GradScaler("cpu", enabled=after))
    second.load(first.saved(), "model", "optimizer", *(["scaler"] if before else []))
    assert torch.equal(second.train(range(HALF, END)), want)
    assert second.scaler.get_scale() == (65536.0 if after else 1.0)


@pytest.mark.parametrize("scaled_before", [True, False])
def test_every_entry_is_loaded(scaled_before: bool) -> None:
    scaler = GradScaler("cpu")
    assert scaler.state_dict().keys() == STATE.keys()
    assert all(scaler.state_dict()[key] != value for key, value in STATE.items())
    if scaled_before:
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(STATE)
    assert scaler.state_dict() == STATE
    assert scaler.scale(torch.ones(())).item() == 1024.0


def test_loading_in_the_middle_divides_by_the_scale_of_the_loss() -> None:
    param, scaler = nn.Parameter(torch.ones(2)), GradScaler("cpu")
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler.scale(param.sum()).backward()
    scaler.load_state_dict(STATE)
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 0.5] and scaler.last_step.scale == 65536.0


def test_a_scaler_without_amp_has_nothing_to_load() -> None:
    assert message_of(
        CheckpointError, GradScaler("cpu").load_state_dict, GradScaler("cpu", enabled=False).state_dict()
    ) == (
        "load_state_dict() got an empty dict: the checkpoint was saved with scaling disabled. Leave the call out: a "
        "fresh GradScaler is what this run starts with."
    )


def test_something_else_is_not_loaded() -> None:
    scaler = GradScaler("cpu")
    assert message_of(CheckpointError, scaler.load_state_dict, {"scale": 4.0, "growth_factor": 2.0, "weight": 1}) == (
        "load_state_dict() misses backoff_factor, growth_interval, _growth_tracker, so this is not a scaler's state. "
        "Pass what GradScaler.state_dict() returned."
    )
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf])
def test_a_scale_that_has_collapsed_is_not_loaded(scale: float) -> None:
    """P3: torch saves and loads a scale of 0."""
    theirs = torch.amp.GradScaler("cpu", init_scale=scale)
    assert message_of(CheckpointError, GradScaler("cpu").load_state_dict, theirs.state_dict()) == (
        f"load_state_dict() got scale={scale:g}, and a scale is finite and at least min_scale=1. Below it the run that "
        "saved it had lost its gradients: start with a fresh GradScaler, or write GradScaler(min_scale=...) if so "
        "small a scale is meant."
    )


def test_a_small_scale_that_is_meant_is_loaded() -> None:
    scaler = GradScaler("cpu", min_scale=2.0**-10)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=0.5).state_dict())
    assert scaler.get_scale() == 0.5


def test_numbers_no_scaler_may_have_are_not_loaded() -> None:
    assert message_of(CheckpointError, GradScaler("cpu").load_state_dict, STATE | {"backoff_factor": 2.0}) == (
        "load_state_dict() got numbers no scaler may have: backoff_factor=2.0 must be in (0, 1)."
    )
