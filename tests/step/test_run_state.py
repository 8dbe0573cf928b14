"""What a stepper gives to those who save weights and optimizers themselves, look at norms, or watch steps."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import CheckpointError, StepError

POLICY = "fp16, output=fp32, scaling.init_scale=1024"


def prepared(lr: float = 0.1) -> mezzo.Stepper:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), POLICY)


def take(amp: mezzo.Stepper, value: float = 1.0) -> mezzo.StepResult:
    amp.zero_grad()
    amp.backward(amp.model(torch.full((3, 4), value)).square().mean())
    return amp.step()


def test_a_state_without_weights_brings_back_scale_and_counters_only() -> None:
    amp, other = prepared(), prepared()
    take(amp)
    assert not take(amp, 1e4)
    state = amp.state_dict(weights=False)
    assert not {"model", "optimizers", "declared"} & state.keys()
    before = {name: p.clone() for name, p in other.model.named_parameters()}
    assert other.load_state_dict(state) == ()
    assert (other.scale, other.counters()) == (amp.scale, amp.counters())
    assert all(torch.equal(p, before[name]) for name, p in other.model.named_parameters())


def test_with_weights_and_optimizer_loaded_it_goes_on_bit_for_bit() -> None:
    amp, other = prepared(), prepared()
    take(amp)
    other.model.load_state_dict(amp.model.state_dict())
    other.optimizers[0].load_state_dict(copy.deepcopy(amp.optimizers[0].state_dict()))
    other.load_state_dict(amp.state_dict(weights=False))
    take(amp)
    take(other)
    assert all(torch.equal(a, b) for a, b in zip(amp.model.parameters(), other.model.parameters(), strict=True))


def test_half_a_state_is_still_refused() -> None:
    amp = prepared()
    state = amp.state_dict()
    del state["model"]
    with pytest.raises(CheckpointError, match="a checkpoint has the keys"):
        amp.load_state_dict(state)


def test_the_norm_is_the_one_that_the_step_reports() -> None:
    amp = prepared()
    amp.backward(amp.model(torch.ones(3, 4)).square().mean())
    norm = amp.grad_norm()
    assert (norm.shape, norm.dtype) == ((), torch.float32)
    assert float(norm) == amp.step().grad_norm


def test_the_norm_of_nothing_is_refused() -> None:
    with pytest.raises(StepError, match="backward"):
        prepared().grad_norm()


def test_an_observer_is_called_around_every_step_until_it_leaves() -> None:
    class Seen(list[object]):
        def before_step(self) -> None:
            self.append(amp.model.weight.grad is not None)

        def after_step(self, result: mezzo.StepResult) -> None:
            self.append(result)

    amp, seen = prepared(), Seen()
    leave = amp.observe(seen)
    first, second = take(amp), take(amp, math.nan)
    assert seen == [True, first, True, second]
    leave()
    take(amp)
    assert len(seen) == 4


@pytest.mark.parametrize("key", ["format", "policy", "scaling", "counters"])
@pytest.mark.parametrize("weights", [True, False])
def test_a_state_that_lacks_a_key_of_every_run_is_refused(key: str, weights: bool) -> None:
    net = nn.Linear(2, 1)
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16")
    state = amp.state_dict(weights=weights)
    del state[key]
    with pytest.raises(CheckpointError, match=f"has no '{key}', which amp.state_dict"):
        amp.load_state_dict(state)
    assert len(amp.load_state_dict({"model": net.state_dict(), "optimizer": amp.optimizers[0].state_dict()})) == 2
