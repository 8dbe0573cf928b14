"""A class may be given another forward at any time; what mezzo runs in its place is for the one that was there."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo

from .test_wrapped_forward import scaled


class Lin(nn.Linear):
    """A class of the program's own, with torch's forward."""


class RootNorm(nn.Module):
    """An RMS norm, written op by op."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype))


class TanhGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sevens(self: nn.Module, x: Tensor) -> Tensor:
    return 0 * x.flatten()[:4] + 7


CASES: dict[str, tuple[nn.Module, type[nn.Module], tuple[int, ...]]] = {
    "a subclass": (Lin(64, 64), Lin, (512, 64)),
    "the class below": (Lin(64, 64), nn.Linear, (512, 64)),
    "Linear": (nn.Linear(64, 64), nn.Linear, (512, 64)),
    "Conv2d": (nn.Conv2d(8, 8, 3), nn.Conv2d, (2, 8, 16, 16)),
    "Dropout": (nn.Dropout(0.5), nn.Dropout, (256, 64)),
    "MaxPool2d": (nn.MaxPool2d(2), nn.MaxPool2d, (8, 16, 32, 32)),
    "LayerNorm": (nn.LayerNorm(64), nn.LayerNorm, (512, 64)),
    "GroupNorm": (nn.GroupNorm(2, 8), nn.GroupNorm, (2, 8, 16)),
    "RMSNorm": (nn.RMSNorm(64), nn.RMSNorm, (512, 64)),
    "an RMS norm by hand": (RootNorm(64), RootNorm, (512, 64)),
    "a GELU by hand": (TanhGelu(), TanhGelu, (512, 64)),
}


@pytest.mark.parametrize("is_again", [False, True], ids=["called", "prepared again"])
@pytest.mark.parametrize("name", CASES)
def test_the_new_one_is_run(name: str, is_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, cls, shape = CASES[name]
    model, x = nn.Sequential(module), torch.randn(shape)
    amp = mezzo.prepare(model, None, "bf16")
    before = model(x)
    with monkeypatch.context() as patched:
        patched.setattr(cls, "forward", sevens)
        if is_again:
            amp.release()
            amp = mezzo.prepare(model, None, "bf16")
        for dtype in (torch.float32, torch.bfloat16):
            assert model(x.to(dtype)).tolist() == [7] * 4
    assert model(x).shape == before.shape
    amp.release()


def test_the_products_of_a_new_one_are_in_the_policys_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Lin(64, 64)), torch.randn(512, 64)
    mezzo.prepare(model, None, "bf16, output=bf16")
    before = model(x)
    monkeypatch.setattr(Lin, "forward", scaled, raising=False)
    assert before.dtype is model(x).dtype is torch.bfloat16 and torch.equal(model(x), 2 * before)


def test_a_new_one_that_calls_torchs_is_run_around_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = nn.MultiheadAttention(16, 2, batch_first=True).eval(), []
    mezzo.prepare(model, None, "bf16")
    x = torch.randn(2, 4, 16)
    want, kept = model(x, x, x)[0], nn.MultiheadAttention.forward

    def counted(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(args))
        return kept(self, *args, **kwargs)

    monkeypatch.setattr(nn.MultiheadAttention, "forward", counted)
    assert torch.equal(model(x, x, x)[0], want) and calls == [3] and want.dtype is F.relu(x).dtype


class Halves(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x / 2


class OfClass(nn.Module):
    divisor = 2

    @classmethod
    def forward(cls, x: Tensor) -> Tensor:
        return x / cls.divisor


class Dispatched(nn.Module):
    """What runs is chosen by the class of the first argument, which is not the module."""

    @functools.singledispatchmethod
    def forward(self, x: Any) -> Any:
        raise TypeError(type(x))

    @forward.register
    def _(self, x: Tensor) -> Tensor:
        return x / 2


class Computed(nn.Module):
    @property
    def forward(self) -> Any:
        return Halves.forward


class Callee:
    def __call__(self, x: Tensor) -> Tensor:
        return x / 2


class Assigned(nn.Module):
    """What no module is handed to."""

    forward = Callee()


class Frozen(nn.Module):
    """Nothing is assigned to it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.divisor, self.is_frozen = 2, True

    def __setattr__(self, name: str, value: object) -> None:
        if vars(self).get("is_frozen"):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.divisor


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16, ops=mezzo", "bf16, module:1=fp32"])
@pytest.mark.parametrize("kind", [Halves, OfClass, Dispatched, Computed, Assigned, Frozen])
def test_a_forward_without_self_and_a_module_that_takes_no_attributes(kind: type[nn.Module], policy: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), kind()), torch.randn(2, 4)
    amp = mezzo.prepare(model, None, policy)
    for one in (model, torch.compile(model, backend="eager")):
        assert torch.equal(one(x), model[0](x).float() / 2)
    amp.release()
    assert type(model[1]) is kind and torch.equal(model(x), model[0](x) / 2)
