"""A forward that somebody wraps after prepare (`m.forward = torch.compile(m.forward)`, hooks of Accelerate) goes on, whatever happens to the model."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo

X = torch.ones(2, 4)
CALLS: list[str] = []


def wrap_(module: nn.Module) -> None:
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        CALLS.append(type(module).__name__)
        return inner(*args, **kwargs)

    module.forward = forward


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def prepared(policy: str, place: str) -> tuple[nn.Sequential, torch.optim.Optimizer, mezzo.Stepper]:
    CALLS.clear()
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy)
    wrap_(model.get_submodule(place))
    return model, optimizer, amp


def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model[0].parameters())})


def replace(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[1] = nn.Tanh()


def losses(model: nn.Module, amp: mezzo.Stepper, count: int) -> list[Tensor]:
    found = []
    for _ in range(count):
        amp.zero_grad()
        loss = model(X).square().mean()
        amp.backward(loss)
        assert amp.step()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16, scaling=16"])
@pytest.mark.parametrize("place", ["", "2"])
@pytest.mark.parametrize("change", [unfreeze, replace])
def test_a_model_that_changes(change: Callable[..., None], place: str, policy: str) -> None:
    runs = []
    for is_wrapped in (False, True):
        model, optimizer, amp = prepared(policy, place)
        if not is_wrapped:
            del model.get_submodule(place).__dict__["forward"]
        found = losses(model, amp, 2)
        change(model, optimizer)
        runs.append(found + losses(model, amp, 2))
        assert len(CALLS) == 4 * is_wrapped
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16, scaling=16"])
@pytest.mark.parametrize("place", ["", "2"])
def test_a_model_that_is_released_and_prepared_again(place: str, policy: str) -> None:
    model, optimizer, amp = prepared(policy, place)
    losses(model, amp, 2)
    amp.release()
    plain = net()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(X), plain(X)) and len(CALLS) == 3
    again = mezzo.prepare(model, optimizer, policy)
    fresh = mezzo.prepare(plain, torch.optim.SGD(plain[2].parameters(), lr=0.1), policy)
    assert all(map(torch.equal, losses(model, again, 2), losses(plain, fresh, 2))) and len(CALLS) == 5


def test_one_that_stood_there_before_is_in_the_region_and_comes_back() -> None:
    CALLS.clear()
    model = net()
    wrap_(model)
    forward = model.forward
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    losses(model, amp, 2)
    amp.release()
    assert model.forward is forward and type(model) is nn.Sequential and len(CALLS) == 2


def scaled(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, self.weight, self.bias)


def old_one(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.old_forward(x)
    return out


def keep_(module: Any) -> None:
    module.old_forward, module.forward = module.forward, types.MethodType(old_one, module)


WAYS: dict[str, tuple[Callable[[Any], object], bool]] = {
    "a method": (lambda m: setattr(m, "forward", types.MethodType(scaled, m)), True),
    "a function": (lambda m: setattr(m, "forward", lambda x: scaled(m, x)), True),
    "wrapped": (wrap_, False),
    "called by a method": (keep_, False),
    "called by a partial": (lambda m: setattr(m, "forward", functools.partial(lambda f, x: f(x), m.forward)), False),
    "compiled": (lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager")), False),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own
@pytest.mark.parametrize("way", WAYS)
def test_one_that_is_replaced_is_told_once_and_one_that_is_called_is_not(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, is_told = WAYS[way]
    model = net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    losses(model, amp, 1)
    change(model[2])
    losses(model, amp, 3)
    said = [record.getMessage() for record in caplog.records if record.name == "mezzo.binding"]
    sentence = (
        "the forward of 2 was assigned after mezzo.prepare and does not call the one that was there, so the policy's rules for it do not "
        "hold. Assign it before mezzo.prepare."
    )
    assert said == [sentence] * is_told
