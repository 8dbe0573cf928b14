"""Weights that torch swaps for others, which nobody may hold a weak reference to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mezzo
from mezzo.casting import weight_casts

X = torch.linspace(-1, 1, 512 * 64).reshape(512, 64)


@pytest.fixture
def swaps() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_cast_of_a_module_drops_kept_casts_first(is_trained: bool, swaps: None) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_trained else None
    mezzo.prepare(model, optimizer, "bf16", cache="persistent")
    want = model(X).detach()
    model.to("cpu").float()
    assert torch.equal(model(X), want)


def test_weights_are_swapped_once_kept_casts_are_dropped() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", cache="persistent")
    amp.backward(model(X).square().mean())
    amp.step()
    amp.zero_grad()
    weight_casts.clear()
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(8, 64)))
    assert torch.equal(model(X), model[0].bias.bfloat16().float().expand(512, 8))
