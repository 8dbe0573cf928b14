"""custom_fwd and custom_bwd (SPEC A12, A13), held to torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from mezzo import Policy, custom_bwd, custom_fwd
from mezzo.casting import autocast
from mezzo.errors import RegionError, RegionTypeError

BF16, FP32 = torch.bfloat16, torch.float32
MEZZO = Policy(compute=BF16, ops="mezzo")
REGIONS = {"dispatcher": {"dtype": BF16}, "mode": {"policy": MEZZO}}


def make(fwd: Any, bwd: Any, seen: list[torch.dtype]) -> type[torch.autograd.Function]:
    class Product(torch.autograd.Function):
        @staticmethod
        @fwd
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            out = a @ b
            seen.extend((a.dtype, out.dtype))
            return out

        @staticmethod
        @bwd
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            da = grad @ b.t()
            seen.append(da.dtype)
            return da, a.t() @ grad

    return Product


def with_setup(
    decorate: Any, cast_inputs: torch.dtype | None, seen: list[torch.dtype]
) -> type[torch.autograd.Function]:
    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=cast_inputs)
        def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            seen.extend((a.dtype, b.dtype))
            return a @ b

        @staticmethod
        @decorate
        def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            seen.append(grad.dtype)
            return grad @ b.t(), a.t() @ grad

    return Product


@pytest.mark.parametrize("cast_inputs", [None, FP32, BF16, torch.float16])
@pytest.mark.parametrize("region", REGIONS)
def test_a_function_with_a_setup_context(region: str, cast_inputs: torch.dtype | None) -> None:
    runs = []
    for is_split in (False, True):
        torch.manual_seed(0)
        a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        seen: list[torch.dtype] = []
        decorate = custom_fwd(cast_inputs=cast_inputs)
        function = with_setup(decorate, cast_inputs, seen) if is_split else make(decorate, custom_bwd, [])
        with autocast("cpu", **REGIONS[region]):
            out = function.apply(a, b)
        out.float().sum().backward()
        assert a.grad is not None and b.grad is not None
        runs.append((out.dtype, out.tolist(), a.grad.tolist(), b.grad.tolist()))
        assert not is_split or seen == ([cast_inputs] * 3 if cast_inputs else [FP32, FP32, BF16])
    assert runs[0] == runs[1]


def test_a_setup_context_without_custom_fwd_is_named() -> None:
    a = torch.randn(4, 4, requires_grad=True)
    out = with_setup(lambda method: method, None, []).apply(a, a)
    with pytest.raises(RegionError, match="where it is given no ctx, decorate its setup_context so"):
        out.sum().backward()


@pytest.mark.parametrize("cast_inputs", [None, FP32, BF16, torch.float16])
def test_the_same_dtypes_and_gradients_as_torchs(cast_inputs: torch.dtype | None) -> None:
    runs = []
    for region, forward, backward in (
        (
            torch.autocast("cpu", dtype=BF16),
            torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs),
            torch.amp.custom_bwd(device_type="cpu"),
        ),
        (autocast("cpu", dtype=BF16), custom_fwd(cast_inputs=cast_inputs), custom_bwd),
        (autocast("cpu", dtype=BF16), custom_fwd(device_type="cpu", cast_inputs=cast_inputs), custom_bwd),
    ):
        torch.manual_seed(0)
        a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        seen: list[torch.dtype] = []
        with region:
            out = make(forward, backward, seen).apply(a, b)
        out.float().sum().backward()
        assert a.grad is not None and b.grad is not None
        runs.append((out.dtype, seen, out.tolist(), a.grad.tolist(), b.grad.tolist()))
    assert runs[0] == runs[1] == runs[2]


def test_outside_a_region_nothing_is_cast() -> None:
    seen: list[torch.dtype] = []
    a, b = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
    make(custom_fwd(cast_inputs=BF16), custom_bwd, seen).apply(a, b).sum().backward()
    assert seen == [FP32, FP32, FP32]


def test_bare_decorator_and_backward_in_the_forwards_own_rules() -> None:
    seen: list[torch.dtype] = []

    class Mean(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.to(BF16).mean().dtype)
            return x.sum()

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(grad.to(BF16).mean().dtype)
            return grad.expand(3)

    x = torch.ones(3, requires_grad=True)
    with autocast("cpu", policy=MEZZO):
        y = Mean.apply(x)
    y.backward()
    assert seen == [FP32, FP32], "the mezzo table keeps mean in fp32, torch's does not"


def test_backward_on_another_thread() -> None:
    seen: list[torch.dtype] = []
    a, b = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
    with autocast("cpu", policy=MEZZO):
        out = make(custom_fwd, custom_bwd, seen).apply(a, b)
    thread = threading.Thread(target=lambda: out.float().sum().backward())
    thread.start()
    thread.join()
    assert seen == [FP32, BF16, BF16]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize("name", REGIONS)
def test_named_tuples_and_dicts_are_cast(name: str) -> None:
    seen: list[torch.dtype] = []

    class Add(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=BF16)
        def forward(ctx: Any, x: torch.Tensor, pair: Pair, more: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.extend((x.dtype, pair.left.dtype, pair.right.dtype, more["z"].dtype))
            return x + pair.left + more["z"]

    x = torch.ones(2)
    with autocast("cpu", **REGIONS[name]):
        Add.apply(x, Pair(x, torch.ones(2, dtype=torch.int64)), {"z": x})
    assert seen == [BF16, BF16, torch.int64, BF16]


@pytest.mark.parametrize("decorate", [custom_fwd, custom_bwd])
def test_a_class_is_no_function(decorate: Callable[..., object]) -> None:
    for given in (decorate, decorate(device_type="cpu")):
        with pytest.raises(RegionTypeError, match="decorates a function, and was given the class Square"):
            given(type("Square", (torch.autograd.Function,), {}))  # type: ignore[operator]


def test_inputs_are_cast_to_floating_dtypes_alone() -> None:
    with pytest.raises(RegionTypeError, match=r"was given torch\.int32 for cast_inputs, .*give a floating dtype"):
        custom_fwd(device_type="cpu", cast_inputs=torch.int32)
