"""A mismatch in a prepared model quotes the line of the model, as in a plain region; no line of mezzo's own is ever quoted."""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from mezzo.errors import CastError

PACKAGE = str(Path(mezzo.__file__).parent)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        gate = torch.heaviside(q, torch.ones(1))
        return F.scaled_dot_product_attention(q, q, q) * gate


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        low = self.proj(x)
        return torch.heaviside(low, x)


class Sums(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        low = super().forward(x)
        return low.index_add_(0, torch.arange(len(x)), x)


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.stem, self.part = nn.Identity(), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.stem(x))


PARTS = [
    (Attention(), (8, 16, 64), "gate = torch.heaviside(q, torch.ones(1))", "q bf16[8,4,16,16] cpu"),
    (Large(), (512, 512), "return torch.heaviside(low, x)", "low bf16[512,512] cpu, x fp32[512,512] cpu"),
    (Sums(8, 8), (4, 8), "return low.index_add_(0, torch.arange(len(x)), x)", "x fp32[4,8] cpu, low bf16[4,8] cpu"),
]


def refusal(model: nn.Module, x: Tensor, region: AbstractContextManager[object] | None = None) -> str:
    with pytest.raises(CastError) as caught, region or nullcontext():
        model(x)
    assert PACKAGE not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("part", "shape", "line", "got"), PARTS)
@pytest.mark.parametrize("policy", ["bf16", "bf16, module:part=bf16", "bf16, module:stem=fp32"])
def test_a_prepared_model_says_what_a_plain_region_says(
    policy: str, part: nn.Module, shape: tuple[int, ...], line: str, got: str
) -> None:
    net, x = Net(copy.deepcopy(part)), torch.randn(shape)
    plain = refusal(net, x, mezzo.autocast("cpu"))
    assert plain.startswith(f"`{line}` ({__file__}:")
    assert f"in module part ({type(part).__name__}) got {got}. torch says:" in plain
    mezzo.prepare(net, None, policy)
    assert refusal(net, x) == plain


@pytest.mark.parametrize(("part", "shape"), [row[:2] for row in PARTS])
def test_a_part_that_is_prepared_alone_is_named_by_its_place(part: nn.Module, shape: tuple[int, ...]) -> None:
    net = Net(copy.deepcopy(part))
    mezzo.prepare(net.part, None, "bf16")
    assert f"in module part ({type(part).__name__}) got" in refusal(net, torch.randn(shape))


@pytest.mark.parametrize(
    ("model", "place"),
    [
        (nn.Linear(512, 512), "the root (Linear)"),
        (nn.Sequential(nn.Linear(512, 512)), "0 (Linear)"),
        (Net(nn.Linear(512, 512)), "part (Linear)"),
    ],
)
@pytest.mark.parametrize("rows", [2, 512])
def test_a_layer_of_torchs_is_named_by_its_place(rows: int, model: nn.Module, place: str) -> None:
    model = copy.deepcopy(model)
    mezzo.prepare(model, None, "bf16")
    message = refusal(model, torch.randn(rows, 512, dtype=torch.float64))
    assert f"in module {place} got " in message and f"fp64[{rows},512] cpu" in message


def test_a_module_that_no_attribute_holds_is_the_root_of_itself() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [Net(Large())]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[0](x)

    assert "in module part (Large) got" in refusal(Teacher(), torch.randn(512, 512), mezzo.autocast("cpu"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the op is read from positions in the source")
def test_a_layer_whose_name_is_that_of_an_op_is_none() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Linear(512, 512).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.softmax(x)

    model = Named()
    mezzo.prepare(model, None, "bf16")
    message = refusal(model, torch.randn(512, 512))
    assert "in module softmax (Linear) got " in message and "A region casts linear always" in message


def test_the_line_of_a_decorated_function_and_of_torchs_operators() -> None:
    @mezzo.autocast("cpu")
    def product(weight: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.heaviside(weight @ weight, x)

    with pytest.raises(CastError) as caught:
        product(torch.ones(4, 4), torch.ones(4, 4))
    assert str(caught.value).startswith(f"`return torch.ops.aten.heaviside(weight @ weight, x)` ({__file__}:")
