"""Dropout and max pooling of prepared models on the CPU: torch's values and random numbers, in less time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.binding.test_convolution import Checkpointed, autocast, prepared, trained
from tests.kernels.test_dropout import needs_kernel
from tests.torch_versions import warns_of_breaks
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mezzo.binding import own_ops
from mezzo.casting import attention
from mezzo.kernels.ops import dropout as dropouts
from mezzo.kernels.ops.dropout import cpu

BF16 = torch.bfloat16


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the kernel drew, for inputs of any size."""
    seen: list[Tensor] = []
    noise = cpu.noise

    def noted(*args: Any) -> Tensor:
        seen.append(noise(*args))
        return seen[-1]

    monkeypatch.setattr(cpu, "noise", noted)
    monkeypatch.setattr(dropouts, "SMALLEST", 1)
    return seen


class Dropped(Checkpointed):
    """Ops in which only dropout runs another way than torch's."""

    def __init__(self, how: str = "plain", inplace: bool = False) -> None:
        super().__init__(how)
        self.drop, self.weight = nn.Dropout(0.3, inplace), nn.Parameter(torch.randn(64))

    def main(self, x: Tensor) -> Tensor:
        return self.drop((x * self.weight).to(BF16)) * 2


def seeded(run: Any, *args: Any) -> list[Tensor]:
    torch.manual_seed(5)
    return [*run(*args), torch.rand(3)]


@needs_kernel
@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
def test_dropout_is_torchs_to_the_bit(how: str, drawn: list[Tensor]) -> None:
    model, x = Dropped(how), torch.randn(32, 64)
    theirs = seeded(autocast, copy.deepcopy(model), x)
    ours = seeded(trained, prepared(model), x)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert len(drawn) == (1 if how == "plain" else 2)


@needs_kernel
@warns_of_breaks
def test_where_dropout_is_torchs(drawn: list[Tensor]) -> None:
    x = torch.randn(32, 64)
    prepared(Dropped()).eval()(x)
    prepared(Dropped(inplace=True))(x)
    prepared(Dropped(), "bf16, modules=none")(x)
    torch.compile(prepared(Dropped()), backend="aot_eager")(x)
    assert drawn == []


@needs_kernel
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "row"])
@pytest.mark.parametrize("scale", [None, 0.3, -0.3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_with_dropout_is_torchs_to_the_bit(
    mask: str, scale: float | None, kv_heads: int, drawn: list[Tensor]
) -> None:
    given = [torch.randn(2, heads, length, 16) for heads, length in ((4, 40), (kv_heads, 24), (kv_heads, 24))]
    options: dict[str, Any] = {"dropout_p": 0.2, "scale": scale, "enable_gqa": kv_heads != 4}
    options["is_causal"] = mask == "causal"
    masks = {"bool": torch.rand(2, 1, 40, 24) > 0.3, "float": torch.randn(40, 24), "row": torch.rand(2, 1, 1, 24) > 0.5}
    found = []
    for watched in (False, True):
        torch.manual_seed(1)
        inputs = [one.clone().requires_grad_() for one in given]
        with torch.autocast("cpu", BF16):
            if watched:
                with attention.AttentionMode():
                    out = F.scaled_dot_product_attention(*inputs, masks.get(mask), **options)
            else:
                out = F.scaled_dot_product_attention(*inputs, masks.get(mask), **options)
            assert torch.is_autocast_enabled("cpu")
        out.float().square().sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        found.append([out.detach(), *[one.grad for one in inputs], torch.rand(3)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert len(drawn) == 1


@needs_kernel
def test_dropout_called_as_a_function_inside_attention_is_drawn_so(drawn: list[Tensor]) -> None:
    class SelfAttention(Dropped):
        def main(self, x: Tensor) -> Tensor:
            return F.dropout((x * self.weight).to(BF16), 0.3, self.training) * 2

    model, x = SelfAttention(), torch.randn(32, 64)
    theirs = seeded(autocast, copy.deepcopy(model), x)
    ours = seeded(trained, prepared(model), x)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert len(drawn) == 1


POOLS = {
    "2": lambda: nn.MaxPool2d(2),
    "3 by 2": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "3 by 1": lambda: nn.MaxPool2d(3, 1, 1),
    "dilated": lambda: nn.MaxPool2d(3, 2, dilation=2),
    "cubes": lambda: nn.MaxPool3d(2),
    "cubes by 1": lambda: nn.MaxPool3d(3, 1, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("name", POOLS)
def test_max_pooling_is_torchs(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, gradients of windows that share elements and hold equal ones, and layouts, NaN and inf among them."""
    pool = POOLS[name]()
    shape = (3, 16, 8, 10, 12) if isinstance(pool, nn.MaxPool3d) else (5, 24, 17, 18)
    x = torch.randn(shape).to(dtype).relu_()
    x.view(-1)[::97], x.view(-1)[5::131], x.view(-1)[7::311] = float("nan"), float("inf"), -0.0
    calls: list[int] = []
    apply = own_ops._MaxPool.apply
    monkeypatch.setattr(own_ops._MaxPool, "apply", lambda *args: calls.append(1) or apply(*args))
    found = []
    for model in (copy.deepcopy(pool), prepared(nn.Sequential(pool), "bf16, output=none")):
        given = x.clone().requires_grad_()
        out = model(given)
        out.backward(torch.arange(out.numel(), dtype=torch.float32).view_as(out).to(dtype))
        assert out.is_contiguous() and given.grad.is_contiguous()
        with torch.no_grad():
            assert torch.equal(model(x).nan_to_num(7), out.nan_to_num(7))
        found.append([out.detach(), given.grad])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7, 8, 9), other.nan_to_num(7, 8, 9))
        assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())
    assert len(calls) == 2


def test_max_pooling_can_be_differentiated_twice() -> None:
    pool, found = nn.MaxPool2d(2), []
    x = torch.randn(2, 16, 32, 32)
    for model in (copy.deepcopy(pool), prepared(nn.Sequential(pool), "bf16, output=none")):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(given).pow(3).sum(), given, create_graph=True)
        first.square().sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        found.append(given.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "case", ["small", "few channels", "channels last", "apart", "indices", "pair", "compiled", "watched"]
)
def test_where_max_pooling_is_torchs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_ops._MaxPool, "apply", lambda *_: pytest.fail("was taken"))
    pool = {
        "apart": nn.MaxPool2d(2, 3),
        "indices": nn.MaxPool2d(2, return_indices=True),
        "pair": nn.MaxPool2d((2, 2)),
    }.get(case, nn.MaxPool2d(2))
    shape = {"small": (1, 16, 8, 8), "few channels": (64, 3, 32, 32)}.get(case, (4, 16, 32, 32))
    x = torch.randn(shape)
    model: Any = prepared(nn.Sequential(pool))
    if case == "channels last":
        x = x.to(memory_format=torch.channels_last)
    if case == "compiled":
        model = torch.compile(model, backend="aot_eager")
    if case == "watched":
        with FlopCounterMode(display=False):
            model(x)
    else:
        model(x)
