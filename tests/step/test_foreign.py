"""Optimizers that step a prepared model's 16-bit weights and were not prepared: those without masters are named in the log."""

from __future__ import annotations

import pytest
import torch
from tests.step.test_advice import X, adamw, net, train
from torch import Tensor
from torch.nn import functional as F

import mezzo
from mezzo.errors import StepError


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
def test_an_optimizer_made_anew_beside_masters(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """As where the cell of a notebook that makes the optimizer is run again: its small updates would be lost without a word."""
    model = net()
    amp = mezzo.prepare(model, adamw(model), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    backward = amp.backward if amp.policy.scaling is None else Tensor.backward
    backward(F.mse_loss(model(X), X))
    with pytest.raises(StepError, match=r"SGD.step\(\) was called on 0.weight, .* it would round its updates away"):
        optimizer.step()
    optimizer.zero_grad()
    train(amp)
    amp.release()
    again = adamw(model)
    train(mezzo.prepare(model, again, policy))  # the one before is still there


def test_an_optimizer_without_masters_of_other_weights_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    amp = mezzo.prepare(model, None, "bf16-master")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(X), X).backward()
        optimizer.step()
    assert caplog.text.count("SGD steps 16-bit weights") == 1
    assert "Write amp.backward(loss) and amp.step()" in caplog.text
    assert amp.policy.params is torch.bfloat16


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_an_optimizer_with_masters_of_its_own_needs_no_word(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    mezzo.prepare(model, None, policy)
    F.mse_loss(model(X), X).backward()
    for optimizer in (
        mezzo.optim.MasterWeights(torch.optim.RMSprop(model.parameters()), mode="kahan"),
        mezzo.optim.AdamW(model.parameters(), master="split"),
    ):
        optimizer.step()
    assert "16-bit weights" not in caplog.text
