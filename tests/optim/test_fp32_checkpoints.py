"""A training in fp32 goes on with 16-bit weights: its weights become masters whatever is loaded first, and its moments stay fp32."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
}
EXACT = ("bf16-master", "fp16-master")


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer, options = OPTIMIZERS[name]
    return model, optimizer(model.parameters(), lr=0.01, **options)


def trained(name: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, optimizer = made(name)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    aux = {"remainder", "master", "step"}
    found = [optimizer.state[p][name] for p in params for name in sorted(optimizer.state.get(p, {})) if name not in aux]
    return [one for one in found if isinstance(one, Tensor) and one.dim()]


@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", ["weights", "optimizer"])
def test_masters_are_the_weights_in_either_order(
    name: str, policy: str, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained(name)
    other, its = made(name)
    amp = mezzo.prepare(other, its, policy)
    parts = [(other, model), (its, optimizer)]
    with caplog.at_level(logging.WARNING, "mezzo"):
        for to, source in parts if first == "weights" else reversed(parts):
            to.load_state_dict(copy.deepcopy(source.state_dict()))
    assert "16-bit weights" not in caplog.text
    for key, weight in model.state_dict().items():
        assert torch.equal(amp.export_weights()[key], weight)
    held = moments(its)
    assert len(held) == len(moments(optimizer))
    assert all(
        one.dtype is torch.float32 and torch.equal(one, two) for one, two in zip(held, moments(optimizer), strict=True)
    )
    for _ in range(30):
        amp.backward(other(torch.randn(5, 6)).float().square().sum())
        if amp.step().applied:
            break
        amp.zero_grad()
    else:
        raise AssertionError("no step was taken")


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_masters_of_weights_written_since_are_not_kept(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """After a step, or a write by hand, nobody knows that what lies beside a weight belongs to it; and it is said."""
    _, optimizer = trained(name)
    other, its = made(name)
    amp = mezzo.prepare(other, its, "bf16-master")
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn(p.shape))
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert "they start from the 16-bit weights" in caplog.text
    for key, weight in amp.export_weights().items():
        assert torch.equal(weight, other.state_dict()[key].float())


def test_whoever_holds_the_inner_optimizer_saves_and_loads_masters() -> None:
    model, inner = trained("NAdam")
    amp = mezzo.prepare(model, inner, "bf16-master")
    exact = amp.export_weights()
    twin, its = made("NAdam")
    other = mezzo.prepare(twin, its, "bf16-master")
    saved = copy.deepcopy((model.state_dict(), inner.state_dict()))
    for order in itertools.permutations(zip((twin, its), saved, strict=True)):
        for to, part in order:
            to.load_state_dict(part)
        assert all(torch.equal(one, exact[key]) for key, one in other.export_weights().items())
    other.release()
    assert "load_state_dict" not in vars(its)
