"""A fixed loss scale: it never grows and never backs off, and a step with inf or NaN is skipped all the same."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo import Policy, ScalingConfig
from mezzo.errors import StoppedRun
from mezzo.loss_scale import LossScale, next_state

FIXED = ScalingConfig.fixed(1024.0)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_no_finding_moves_it(device: str | None) -> None:
    for findings in product([False, True], repeat=6):
        state = LossScale.start(FIXED, device)
        for found in findings:
            assert not bool(state.is_exhausted(found, FIXED, None))
            state = next_state(state, torch.tensor(found) if device else found, FIXED)
            assert float(state.scale) == 1024.0
        row = len(findings) - max((i for i, found in enumerate(findings, 1) if not found), default=0)
        assert int(state.skipped_in_a_row) == row


def prepared(policy: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def step(model: nn.Module, amp: Any, factor: float = 1.0) -> Any:
    amp.zero_grad()
    amp.backward((model(torch.ones(3, 4)).float() * factor).square().mean())
    return amp.step()


def test_the_engine_divides_by_it_and_skips() -> None:
    model, amp = prepared("fp16, output=fp32, scaling=1024")
    plain, twin = prepared("fp16, output=fp32, scaling=none")
    for _ in range(3):
        assert step(model, amp).scale == 1024.0
        step(plain, twin)
    torch.testing.assert_close(model.weight, plain.weight, rtol=2**-9, atol=2**-14)
    before = model.weight.detach().clone()
    result = step(model, amp, 3e4)  # overflows in the scaled gradient
    assert not result.applied and torch.equal(model.weight, before)
    assert step(model, amp).scale == 1024.0


def test_a_checkpoint_of_another_scale_does_not_move_it() -> None:
    model, amp = prepared("fp16, output=fp32")
    step(model, amp)
    other, fixed = prepared("fp16, output=fp32, scaling=1024")
    sentences = fixed.load_state_dict(amp.state_dict())
    assert "the saved loss scale 65536 is dropped: this policy's is fixed at 1024" in sentences
    assert step(other, fixed).scale == 1024.0


def test_patience_still_ends_a_run_that_no_scale_helps() -> None:
    model, amp = prepared("fp16, output=fp32, scaling=1024, guard.patience=2")
    with pytest.raises(StoppedRun):
        for _ in range(4):
            step(model, amp, 3e4)


def test_text_value_and_file_agree() -> None:
    assert Policy.parse("fp16, scaling=1024").scaling == FIXED
