"""A run that a learning rate too high has blown up is told the rate first, and one that overflows for another reason is not."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.step.replay_models import FeedForward, fail
from tests.step.step_models import batch, mse
from torch import nn

import mezzo
from mezzo.errors import InvariantError, LossScaleExhausted, NonFiniteStep

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=30.0),
    "mezzo-adamw": lambda params: mezzo.optim.AdamW(params, lr=30.0),
    "mezzo-sgd": lambda params: mezzo.optim.SGD(params, lr=0.3),
    "masters": lambda params: mezzo.optim.MasterWeights(torch.optim.AdamW(params, lr=30.0)),
}


def deep() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def train(amp: mezzo.Stepper, steps: int, factor: float = 1.0) -> None:
    x = torch.randn(64, 32)
    for _ in range(steps):
        amp.zero_grad()
        amp.backward((factor * amp.model(x) - x.sum(1, keepdim=True)).square().mean())
        amp.step()


def blow_up(optimizer: str, policy: str) -> str:
    model = deep()
    amp = mezzo.prepare(model, OPTIMIZERS[optimizer](model.parameters()), f"{policy}, guard.check_every=0")
    with pytest.raises((NonFiniteStep, LossScaleExhausted)) as caught:
        train(amp, 60)
    return str(caught.value)


@pytest.mark.parametrize("policy", ["fp16", "fp16-master"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_rate_is_named_before_any_rule(optimizer: str, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    if optimizer == "masters" and policy == "fp16":
        pytest.skip("fp32 weights need no masters")
    said = blow_up(optimizer, policy)
    rate = "lr=0.3" if "sgd" in optimizer or optimizer == "momentum" else "lr=30"
    assert f"at {rate} was " in said and "the learning rate is too high" in said, said
    assert "Write lr=0.03 or less" in said or "Write lr=3 or less" in said
    assert said.index("learning rate") < min(said.find(" to the policy") % 10**6, said.find("Run again") % 10**6), said
    early = [r.getMessage() for r in caplog.records if "why: " in r.getMessage() and r.levelno >= logging.WARNING]
    assert all("why: The last update of" in text for text in early)


@pytest.mark.parametrize("optimizer", ["sgd", "mezzo-sgd"])
def test_the_rate_is_named_where_bf16_overflows(optimizer: str) -> None:
    assert "the learning rate is too high" in blow_up(optimizer, "bf16")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, mezzo.optim.AdamW])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp32"])
def test_the_rate_is_named_where_squares_of_gradients_overflow(policy: str, kind: type[torch.optim.AdamW]) -> None:
    model = deep()
    amp = mezzo.prepare(model, kind(model.parameters(), lr=1000.0), policy)
    with pytest.raises(
        InvariantError, match=r"exp_avg_sq.* hold inf or NaN.* at lr=1000 .*the learning rate is too high"
    ):
        train(amp, 5)


def test_the_rate_is_named_where_no_weight_is_finite_any_more() -> None:
    model = deep()
    amp = mezzo.prepare(model, torch.optim.Adam(model.parameters(), lr=1e6), "fp16-master, scaling.init_scale=16")
    amp.backward(model(torch.randn(8, 32)).square().mean())
    with pytest.raises(InvariantError, match=r"at lr=1e\+06 was .*the learning rate is too high"):
        amp.step()


def test_a_large_gradient_at_a_small_rate_blames_no_rate() -> None:
    model = deep()
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "bf16")
    amp.backward(1e22 * model(torch.randn(8, 32)).float().square().mean())
    with pytest.raises(InvariantError, match=r"hold inf or NaN\. Load the last"):
        amp.step()


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
@pytest.mark.parametrize("kind", "RMSprop Adamax NAdam RAdam Adagrad ASGD".split())
def test_the_rate_is_named_of_other_optimizers_too(kind: str, policy: str) -> None:
    model = deep()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1000.0)
    amp = mezzo.prepare(model, optimizer, f"{policy}, guard.check_every=0, guard.patience=2")
    with pytest.raises((NonFiniteStep, InvariantError), match=r"at lr=1000 was .*the learning rate is too high"):
        train(amp, 60, factor=1e3)


def test_a_clipped_gradient_that_was_large_is_no_update_that_was() -> None:
    model = deep()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16, guard.patience=2")
    x = torch.randn(8, 32)
    amp.backward(1e5 * model(x).float().square().mean())
    assert amp.step(max_norm=0.01)
    amp.zero_grad()
    with pytest.raises(NonFiniteStep) as caught:
        for _ in range(3):
            amp.backward(model(x * torch.inf).square().mean())
            amp.step(max_norm=0.01)
            amp.zero_grad()
    assert "learning rate" not in str(caught.value)


def test_an_overflow_of_another_reason_is_told_as_before() -> None:
    model = FeedForward(1.0)
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "fp16, output=fp32, guard.patience=2")
    x, y = batch()
    for _ in range(3):
        amp.zero_grad()
        amp.backward(mse(model(x), y))
        amp.step()
    amp.zero_grad()
    with torch.no_grad():
        model.down.weight.mul_(1000)
    said = str(fail(amp, x, y))
    assert "Add 'module:down=fp32' to the" in said and "learning rate" not in said
