"""State that somebody empties, to have moments begin anew, has masters in it: the log says what is lost, and how to keep it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.kernels import AUX_STATE
from mezzo.optim import SGD, AdamW, MasterWeights

MODES = ("split", "fp32", "kahan")
SAID = "the state of {} was emptied since its last step, and with it the masters of 2 weights"


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    low = [nn.Parameter(torch.randn(5, generator=generator).bfloat16()) for _ in range(2)]
    return [*low, nn.Parameter(torch.randn(3, generator=generator))]


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], value: float = 1e-3) -> None:
    for p in params:
        p.grad = torch.full_like(p, value)
    optimizer.step()


KINDS: dict[str, Callable[[list[nn.Parameter], Any], Any]] = {
    "AdamW": lambda params, mode: AdamW(params, lr=1e-4, master=mode),
    "SGD": lambda params, mode: SGD(params, lr=1e-4, momentum=0.9, master=mode),
    "MasterWeights": lambda params, mode: MasterWeights(torch.optim.RMSprop(params, lr=1e-4), mode),
}


def made(kind: str, mode: str, steps: int) -> tuple[Any, list[nn.Parameter]]:
    params = weights()
    optimizer = KINDS[kind](params, mode)
    for _ in range(steps):
        step(optimizer, params)
    return optimizer, params


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_it_is_said_once(kind: str, mode: str, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    optimizer, params = made(kind, mode, steps)
    optimizer.state.clear()
    step(optimizer, params)
    step(optimizer, params)
    assert [SAID.format(kind) in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_masters_that_are_taken_out_alone_are_said_too(kind: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    optimizer, params = made(kind, mode, 2)
    for p in params[:2]:
        del optimizer.state[p][AUX_STATE[mode]]
    step(optimizer, params)
    step(optimizer, params)
    assert [SAID.format(kind) in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("mode", ["split", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_advised_has_moments_alone_begin_anew(kind: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """As torch's own optimizer does from the same fp32 weights."""
    optimizer, params = made(kind, mode, 3)
    masters = {p: optimizer.master(p).clone() for p in optimizer.state}
    plain = [nn.Parameter(masters[p].clone()) for p in params]
    optimizer.state.clear()
    optimizer.set_masters_(masters)
    twins = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "MasterWeights": torch.optim.RMSprop}
    twin = twins[kind](plain, lr=1e-4, **({"momentum": 0.9} if kind == "SGD" else {}))
    step(optimizer, params, 0.5)
    step(twin, plain, 0.5)
    for p, want in zip(params, plain, strict=True):
        torch.testing.assert_close(optimizer.master(p), want.detach(), rtol=2**-22, atol=0)
    assert caplog.text == ""


def reload(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def reload_without(optimizer: Any, params: list[nn.Parameter]) -> None:
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {}})


def grow(optimizer: Any, params: list[nn.Parameter]) -> None:
    params[0].data, params[0].grad = torch.ones(7).bfloat16(), None
    optimizer.state.pop(params[0])


def freeze(optimizer: Any, params: list[nn.Parameter]) -> None:
    del optimizer.param_groups[0]["params"][1]
    optimizer.state.pop(params[1])


def nothing(optimizer: Any, params: list[nn.Parameter]) -> None: ...


@pytest.mark.parametrize("change", [nothing, reload, reload_without, grow, freeze])
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_is_told_nothing(kind: str, change: Any, caplog: pytest.LogCaptureFixture) -> None:
    optimizer, params = made(kind, "split", 2)
    change(optimizer, params)
    for _ in range(2):
        step(optimizer, params)
    assert "was emptied" not in caplog.text


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_weight_that_was_given_its_master_lacks_none(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    optimizer, params = made(kind, "split", 2)
    params[0].grad, params[0].data = None, optimizer.master(params[0]).clone()
    del optimizer.state[params[0]]["remainder"]
    step(optimizer, params)
    assert caplog.text == ""


def test_an_adopted_optimizer_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, "bf16-master")

    def take() -> Tensor:
        amp.zero_grad()
        loss: Tensor = model(torch.ones(3, 4)).square().mean()
        amp.backward(loss)
        assert amp.step()
        return loss

    take()
    optimizer.state.clear()
    take()
    assert caplog.text.count("was emptied") == 1
