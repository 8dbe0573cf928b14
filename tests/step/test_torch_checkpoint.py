"""torch's own recipe for checkpoints (get_state_dict, dcp.load, set_state_dict) goes on bit for bit, or says what it lost."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.step.step_models import Net, batch, mse
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mezzo
from mezzo.errors import PolicyError, StepError

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "damped SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "mezzo.optim.AdamW": lambda params: mezzo.optim.AdamW(params, lr=0.01, amsgrad=True),
}


def make(policy: str, optimizer: Make) -> mezzo.Stepper:
    torch.manual_seed(0)
    model = Net()
    return mezzo.prepare(model, optimizer(model.parameters()), policy)


def train(amp: mezzo.Stepper, seeds: range) -> dict[str, torch.Tensor]:
    for seed in seeds:
        torch.manual_seed(seed)
        x, y = batch()
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y))
        assert amp.step().applied
    return amp.export_weights()


def states(amp: mezzo.Stepper) -> dict[str, Any]:
    weights, state = get_state_dict(amp.model, amp.optimizers[0])
    return {"weights": weights, "state": state}


def resume(amp: mezzo.Stepper, folder: Path) -> None:
    state = states(amp)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(amp.model, amp.optimizers[0], model_state_dict=state["weights"], optim_state_dict=state["state"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's, of a folder without ranks
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["bf16", "fp32", "bf16-master", "bf16, params=bf16, master=kahan"])
def test_a_run_goes_on_from_torchs_recipe(policy: str, optimizer: str, tmp_path: Path) -> None:
    amp = make(policy, OPTIMIZERS[optimizer])
    train(amp, range(3))
    dcp.save(states(amp), checkpoint_id=tmp_path)
    expected = train(amp, range(3, 6))
    other = make(policy, OPTIMIZERS[optimizer])
    resume(other, tmp_path)
    assert [group["lr"] for group in other.optimizers[0].param_groups] == [0.01]
    found = train(other, range(3, 6))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("goes_on_in", ["as before", "bf16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "damped SGD", "NAdam"])
@pytest.mark.parametrize(
    "policy", ["bf16-master", "fp16-master, scaling.init_scale=16", "bf16, params=bf16, master=kahan"]
)
def test_masters_that_were_loaded_before_prepare_stay(
    policy: str, optimizer: str, goes_on_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The usual order: model and optimizer are made and loaded, then handed on; torch casts the state on the way."""
    kind = {**OPTIMIZERS, "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01)}[optimizer]
    amp = make(policy, kind)
    expected = train(amp, range(3))
    saved = copy.deepcopy((amp.model.state_dict(), amp.optimizers[0].state_dict()))

    def load(*, change: float = 0.0) -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        other = kind(model.parameters())
        model.load_state_dict({name: value.float() + change for name, value in saved[0].items()})
        other.load_state_dict(copy.deepcopy(saved[1]))
        return model, other

    to = policy if goes_on_in == "as before" else goes_on_in
    model, other = load()
    with caplog.at_level(logging.WARNING):
        again = mezzo.prepare(model, other, to)
    assert not caplog.messages
    assert all(torch.equal(value, expected[name]) for name, value in again.export_weights().items())
    assert (to != "bf16") or not {"remainder", "master", "compensation"} & set().union(*other.state.values())

    model, other = load()
    before, held = copy.deepcopy((model.state_dict(), other.state_dict()))
    with pytest.raises(PolicyError):
        mezzo.prepare(model, other, f"{to}, *.nothing=fp32")
    assert str(other.state_dict()) == str(held)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    model, other = load()
    model.load_state_dict(expected)  # the masters themselves
    with caplog.at_level(logging.WARNING):
        again = mezzo.prepare(model, other, to)
    assert not caplog.messages
    assert all(torch.equal(value, expected[name]) for name, value in again.export_weights().items())

    model, other = load(change=2.0**-20)
    with caplog.at_level(logging.WARNING):
        again = mezzo.prepare(model, other, to)
    assert sum("saved beside other weights" in message for message in caplog.messages) == 1
    if to == "bf16":
        assert all(torch.equal(p, saved[0][name].float() + 2.0**-20) for name, p in model.named_parameters())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_moments_that_torchs_recipe_left_unread_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    amp = make("bf16-master", lambda params: torch.optim.NAdam(params, lr=0.01))
    train(amp, range(2))
    saved = amp.optimizers[0].state_dict()
    amp.optimizers[0].load_state_dict(saved)
    assert not caplog.messages
    aux = {
        key: {name: held for name, held in entry.items() if name == "remainder"}
        for key, entry in saved["state"].items()
    }
    with caplog.at_level(logging.WARNING):
        amp.optimizers[0].load_state_dict({**saved, "state": aux})
    assert any("masters and nothing else" in message and "amp.state_dict()" in message for message in caplog.messages)


@pytest.mark.parametrize(("lr", "value"), [(0.01, 0.0), (0.0, 1.0)])
def test_a_direct_step_that_moves_something_is_refused_still(lr: float, value: float) -> None:
    amp = make("bf16", lambda params: torch.optim.AdamW(params, lr=lr))
    for p in amp.model.parameters():
        p.grad = torch.full_like(p, value)
    with pytest.raises(StepError, match="called directly"):
        amp.optimizers[0].step()
