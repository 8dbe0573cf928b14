"""Optimizers that skip each by itself: who skips is who skips with torch's scaler, whatever order they step in."""

from __future__ import annotations

import pytest
import torch
from tests.step.step_models import INF, wait_for_nothing
from torch import nn

import mezzo

SCALE = 1024.0
POLICIES = ["fp32", f"fp32, scaling.init_scale={SCALE:g}"]


def nets() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    return model, [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"]


def losses(model: nn.ModuleDict, spoilt: str) -> list[torch.Tensor]:
    x = torch.ones(1, 4)
    return [model[name](x).square().sum() * (INF if name == spoilt else 1.0) for name in "ab"]


def by_torch(spoilt: str) -> list[torch.Tensor]:
    """The weights after three steps by torch's scaler, in the second of which the loss of one is inf."""
    model, optimizers = nets()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for number in range(3):
        model.zero_grad()
        for loss in losses(model, spoilt if number == 1 else ""):
            scaler.scale(loss).backward()
        for one in optimizers:
            scaler.step(one)
        scaler.update()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spoilt", ["a", "b"])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_bad_loss_of_one_lets_the_other_step_as_torchs_scaler_does(
    policy: str, spoilt: str, drops: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        wait_for_nothing(monkeypatch)
    model, optimizers = nets()
    amp = mezzo.prepare(model, optimizers, policy, skip="independent")
    for number in range(3):
        amp.zero_grad()
        for loss in losses(model, spoilt if number == 1 else ""):
            amp.backward(loss)
        for name, one in zip("ab", optimizers, strict=True):
            assert bool(amp.step(optimizer=one)) is not (number == 1 and name == spoilt)
            if drops:
                one.zero_grad()
    assert all(map(torch.equal, model.parameters(), by_torch(spoilt)))


def test_a_bad_loss_that_spoilt_no_gradient_is_everybodys() -> None:
    model, optimizers = nets()
    amp = mezzo.prepare(model, optimizers, "fp32", skip="independent")
    amp.backward(sum(losses(model, "")) + torch.tensor(INF))
    results = [amp.step(optimizer=one) for one in optimizers]
    assert [(bool(one), one.reason) for one in results] == [(False, "loss")] * 2


@pytest.mark.parametrize(("skip", "taken"), [("independent", (False, True)), ("together", (False, False))])
@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("on_device", [False, True])
def test_what_was_bad_before_an_edit_is_its_optimizers_matter(
    skip: str, taken: tuple[bool, bool], edited: bool, policy: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where torch's scaler unscales one optimizer after the other."""
    if on_device:
        wait_for_nothing(monkeypatch)
    model, optimizers = nets()
    amp = mezzo.prepare(model, optimizers, policy, skip=skip)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for loss in losses(model, "a"):
        amp.backward(loss)
    with amp.unscaled_grads() as grads:
        for grad in grads.values() if edited else ():
            grad.nan_to_num_(0.0, 0.0, 0.0)
    assert amp.step().optimizers == taken
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not (name.startswith("b") and taken[1])
