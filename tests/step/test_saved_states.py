"""States that are saved in the middle of a step, and those of sparse gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.step.test_state_dict import batch, train
from torch import nn

import mezzo


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, mezzo.optim.SGD])
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_state_that_is_saved_in_the_middle_of_a_step_is_said_to_be(
    policy: str, failure: Any, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is saved all the same: who saves in `except KeyboardInterrupt` would lose the run. And the step is not taken twice."""
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy)
    train(amp, [batch()])
    assert amp.state_dict() and not caplog.records

    def fail(*_: Any) -> None:
        raise failure

    hook = amp.optimizers[0].register_step_post_hook(fail)
    with pytest.raises(failure):
        train(amp, [batch()])
    hook.remove()
    assert amp.state_dict()["counters"]["seen"] == 1
    (told,) = [record.getMessage() for record in caplog.records if "state_dict" in record.getMessage()]
    assert told.startswith("amp.state_dict() was called after a step()") and "may be half of that step" in told
    with pytest.raises(mezzo.errors.StepError, match="called after a step"):
        amp.step()
    amp.zero_grad()
    caplog.clear()
    train(amp, [batch()])
    assert amp.state_dict() and not caplog.records


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_sparse_momentum_is_resumed_and_what_is_no_state_of_a_parameter_released(policy: str) -> None:
    """torch's SGD keeps the momentum of sparse gradients sparse."""

    def make() -> mezzo.Stepper:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
        return mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy)

    def go_on(amp: mezzo.Stepper) -> None:
        for row in range(2):
            amp.zero_grad()
            amp.backward(amp.model(torch.tensor([row, 3])).float().sum())
            assert amp.step()

    one, other = make(), make()
    go_on(one)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for amp in (one, other):
        go_on(amp)
        amp.optimizers[0].state["note"] = 3  # type: ignore[index]  # a key of the program's own
        amp.release()
    assert all(map(torch.equal, one_weights := list(one.model.parameters()), other.model.parameters()))
    assert all(p.dtype is torch.float32 for p in one_weights)
