"""A flag read without waiting: here the way of devices that have no events; CUDA's is in test_scaler_cuda."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import LossScaleExhausted
from mezzo.loss_scale import GradScaler
from mezzo.loss_scale.async_flag import AsyncFlag


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
    monkeypatch.setattr(GradScaler, "_reads", lambda scaler, verdict, at_once: scaler._peek.ask(torch.tensor(verdict)))
    scaler = GradScaler("cpu", patience=2)
    scaler._peek = AsyncFlag(interval=8)
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
