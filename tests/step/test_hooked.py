"""Hooks of the user's that see gradients while they carry the loss scale: said once, by name, and only where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from tests.step.step_models import Net, batch, mse
from torch import nn

import mezzo

SAID = "see gradients multiplied by the loss scale"


def clamp(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.05, 0.05)


HOOKS: dict[str, Callable[[nn.Parameter], object]] = {
    "tensor": lambda p: p.register_hook(lambda grad: grad.clamp(-0.05, 0.05)),
    "accumulated": lambda p: p.register_post_accumulate_grad_hook(clamp),
}


def train(policy: str, hook: Callable[[nn.Parameter], object] | None, caplog: pytest.LogCaptureFixture) -> list[str]:
    model = Net()
    if hook is not None:
        hook(model.inner.weight)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), policy)
    with caplog.at_level(logging.WARNING, "mezzo.loss_scale"):
        for _ in range(4):
            x, y = batch()
            amp.backward(mse(model(x), y))
            amp.step()
            amp.zero_grad()
    return [record.getMessage() for record in caplog.records if SAID in record.getMessage()]


@pytest.mark.parametrize("policy", ["fp16, scaling=1024", "fp16-master, scaling=1024"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_prepared_run_says_which(kind: str, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = train(policy, HOOKS[kind], caplog)
    assert said.startswith("hooks on inner.weight see")
    assert "amp.step(clip_value=...)" in said


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_without_a_loss_scale_hooks_see_true_gradients(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    assert train(policy, HOOKS["tensor"], caplog) == []


def test_nothing_is_said_of_the_hooks_of_a_watch(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "fp16, scaling=1024")
    with caplog.at_level(logging.WARNING, "mezzo.loss_scale"), mezzo.diagnose.watch(amp, every=1):
        x, y = batch()
        amp.backward(mse(model(x), y))
        amp.step()
    assert [record.getMessage() for record in caplog.records if SAID in record.getMessage()] == []


def test_nothing_is_said_where_no_hook_is(caplog: pytest.LogCaptureFixture) -> None:
    assert train("fp16, scaling=1024", None, caplog) == []


@pytest.mark.parametrize("kind", [*HOOKS, "none"])
def test_the_scaler_says_it_too(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    if kind != "none":
        HOOKS[kind](model.inner.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = mezzo.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        optimizer.zero_grad()
        x, y = batch()
        scaler.scale(mse(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert caplog.text.count(SAID) == (kind != "none")
