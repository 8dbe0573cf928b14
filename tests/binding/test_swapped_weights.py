"""Weights that torch swaps for others, which nobody may hold a weak reference to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

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


class Wrapped(torch.Tensor):
    """A weight made of another tensor, as quantized ones are: torch swaps it whatever the setting."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        own = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]  # torch's own
        own.inner = inner
        return own  # type: ignore[no-any-return]  # torch's own

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Wrapped:
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        found = op(*args, **kwargs)
        wraps = op in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.alias.default)
        return Wrapped(found) if wraps else found


def test_a_model_with_frozen_weights_of_another_class_is_moved() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(Wrapped(model[0].weight.detach()), requires_grad=False)
    amp = mezzo.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1), "bf16")
    weight = model[0].weight
    model.to("cpu")
    assert model[0].weight is weight
    amp.backward(model(X).square().mean())
    assert amp.step().applied


def steps(policy: str, moment: str) -> list[torch.Tensor]:
    """Train two steps, the model moved at a moment of each; return weights and what else a step left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model[0].bias.requires_grad_(False)
    amp = mezzo.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), policy)
    for _ in range(5):
        for _ in range(2):
            amp.backward(model(X).square().mean())
            if moment == "between backward and step":
                grads = [p.grad for p in model.parameters()]
                model.to("cpu")
                assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert amp.step().applied
        if moment == "after the step":
            model.cpu()
        amp.zero_grad()
        if moment == "after zero_grad":
            model.to("cpu")
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master,scaling=1024", "bf16-master,grads=fp32"])
@pytest.mark.parametrize("moment", ["between backward and step", "after the step", "after zero_grad"])
def test_a_model_is_moved_as_without_swaps(policy: str, moment: str, swaps: None) -> None:
    moved = steps(policy, moment)
    torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(map(torch.equal, moved, steps(policy, "never")))


def test_a_swapped_weight_keeps_the_dtype_of_its_gradients(swaps: None) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master,grads=fp32")
    model.to("cpu")
    amp.backward(model(X).square().mean())
    assert model[0].weight.grad is not None and model[0].weight.grad.dtype is torch.float32


def test_gradients_stay_where_a_swap_is_refused(swaps: None) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16")
    amp.backward(model(X).square().mean())
    grad = model[0].weight.grad
    held = weakref.ref(model[0].weight)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        model.to("cpu")
    assert held() is not None and model[0].weight.grad is grad
    assert amp.step().applied
