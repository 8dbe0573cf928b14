"""What a signal's handler calls in the middle of a step: it gets what it gets elsewhere, or is told, and the step goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.step.test_interrupted import SRC, reached
from torch import Tensor, nn

import mezzo
from mezzo.errors import CheckpointError


def prepared(policy: str, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, mezzo.Stepper]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    return model, mezzo.prepare(model, kind(model.parameters(), lr=0.1), policy)


def train(model: nn.Module, amp: mezzo.Stepper, steps: int = 1) -> None:
    for _ in range(steps):
        amp.zero_grad()
        amp.backward(model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean())
        amp.step()


@pytest.mark.parametrize("policy", ["bf16-master", "bf16, op:softmax=low"])
@pytest.mark.parametrize("inside", ["binding/forward.py", "casting/region.py"])
def test_a_forward_in_a_handler_computes_what_it_computes_elsewhere(inside: str, policy: str) -> None:
    """On the way into the policy's region and out of it, too."""
    model, _ = prepared(policy)
    x, at = torch.linspace(-1, 1, 12).reshape(3, 4), 0
    want, got, outs = model(x), list[Tensor](), list[Tensor]()
    while reached(lambda: outs.append(model(x)), at, f"{SRC}/{inside}", lambda: got.append(model(x))):
        at += 1
    assert at > 40 and len(got) == at
    for out in (*got, *outs):  # inside the region what comes out is not widened yet
        assert torch.equal(out.float(), want)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=64"])
def test_counters_read_in_a_handler_count_each_step_once(policy: str) -> None:
    """The step that is read just then is read by both."""
    at = 0
    while True:
        model, amp = prepared(policy)
        train(model, amp, 3)
        was_handled = reached(lambda: train(model, amp, 2), at, f"{SRC}/step/guard.py", amp.counters)  # noqa: B023
        train(model, amp)
        assert amp.counters().seen == amp.counters().applied == 6, at
        if not was_handled:
            break
        at += 1
    assert at > 10


def test_weights_exported_in_the_middle_of_a_step_are_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    """As a state is that is saved there; at the end of the step it is whole."""
    model, amp = prepared("bf16-master")
    train(model, amp)
    reached(lambda: train(model, amp), 0, f"{SRC}/kernels/ops/adamw/", amp.export_weights)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith("amp.export_weights() was called after a step() that has not ended"), told
    caplog.clear()
    assert amp.export_weights() and not caplog.records


def test_a_state_is_not_saved_while_masters_are_in_the_place_of_weights() -> None:
    """What to write is said, and no state is to be deleted for it."""
    told, at = set[str](), 0

    def save() -> None:
        try:
            amp.state_dict()
        except CheckpointError as error:
            told.add(str(error))

    model, amp = prepared("bf16-master", torch.optim.RMSprop)
    train(model, amp)
    while reached(lambda: train(model, amp), at, f"{SRC}/optim/master_weights.py", save):
        at += 3
    (one,) = told
    assert one == (
        "amp.state_dict() was asked of a MasterWeights in the middle of its step, as by a signal's handler. Have the handler set a flag, "
        "and save where amp.step() has returned."
    )
    assert amp.state_dict()["counters"]["applied"] == amp.counters().applied
