"""An average that was made before `prepare` follows 16-bit weights without their masters, and the log says so."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mezzo

from .test_advice import ModelEma, adamw, net


class Callback:
    """As frameworks keep an average: in a list of the object that prepares."""

    def __init__(self, average: nn.Module) -> None:
        self._average_model = average


class Program:
    def __init__(self, model: nn.Module, policy: str, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        self.amp = mezzo.prepare(model, adamw(model), policy)


@pytest.mark.parametrize("make", [AveragedModel, ModelEma])
@pytest.mark.parametrize("place", ["a variable", "a member", "a callback"])
def test_an_average_made_before_prepare_is_named(make: Any, place: str, caplog: pytest.LogCaptureFixture) -> None:
    said = f"{make.__name__} was made before mezzo.prepare, and its weights follow the model's as these are rounded to bf16"

    def build(model: nn.Module, policy: str) -> str:
        caplog.clear()
        average = make(model)
        kept = {"a variable": {}, "a member": {"ema": average}, "a callback": {"callbacks": [Callback(average)]}}[place]
        if place != "a variable":
            del average
        Program(model, policy, kept)
        return caplog.text

    assert build(net(), "bf16-master").count(said) == 1
    assert "was made before" not in build(net(), "bf16") + build(net(), "fp32")


class Proxy:
    """As frameworks have them in globals and lists: fails at any question outside of a request."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_what_answers_no_question_is_asked_none() -> None:
    proxy, model = Proxy(), net()
    assert Program(model, "bf16-master", {"proxy": proxy, "proxies": [proxy]}).amp.model is model


def test_an_average_of_another_model_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    model, other = net(), AveragedModel(nn.Linear(3, 3))
    mezzo.prepare(model, adamw(model), "bf16-master")
    assert other and "was made before" not in caplog.text


def test_the_average_of_an_earlier_fold_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """As in a sweep, or where a cell of a notebook is run twice: models of one shape, each with its average by the recipe of the docs."""
    averages = []
    for _ in range(2):
        model = net()
        amp = mezzo.prepare(model, adamw(model), "bf16-master")
        plain = copy.deepcopy(model).float()
        averages.append(average := AveragedModel(plain))
        amp.backward(model(torch.randn(4, 8)).square().mean())
        assert amp.step()
        plain.load_state_dict(amp.export_weights())
        average.update_parameters(plain)
    assert caplog.text == ""


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16"])
def test_looking_around_keeps_nothing_alive(policy: str) -> None:
    model, weight = net(), torch.tensor(2.0)
    seen, amp = weakref.ref(model), mezzo.prepare(model, adamw(model), policy)
    for _ in range(2):
        amp.zero_grad()
        amp.backward(model(torch.randn(4, 8)).square().mean() * weight)  # looks for a scaler whose factor that is
        amp.step()
    del model, amp
    gc.collect()
    assert seen() is None


def test_what_a_caller_keeps_of_its_variables_stays_its() -> None:
    model = net()
    mine = locals()
    mezzo.prepare(model, adamw(model), "bf16-master")
    assert mine["model"] is model


def test_a_comprehension_that_shares_its_variable_may_prepare() -> None:
    made = {policy: mezzo.prepare(model := net(), adamw(model), policy) for policy in ("bf16-master", "fp16")}
    read = {policy: tuple(policy for _ in range(2)) for policy in made}  # Python 3.13.0 crashed at what is read in here
    assert [*read.values()] == [(policy, policy) for policy in made]
    number = 1
    steppers = [mezzo.prepare(model := net(), adamw(model), "bf16-master") for number in range(1)]  # not the one above
    assert steppers and (lambda: number)() == 1  # noqa: PLC3002
