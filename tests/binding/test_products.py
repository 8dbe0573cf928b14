"""Large products of prepared models where the processor emulates 16 bit: computed in fp32, and what torch.autocast computes in everything else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tolerance import relative
from torch import Tensor, nn

import mezzo
from mezzo.binding import own_ops
from mezzo.binding.module_rules import has_lstm_kernel
from mezzo.casting import mode, products, wide
from mezzo.kernels import is_emulated

LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16, scaling=none"}


class Op(nn.Module):
    """An op with weights of its own."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


class First(nn.Module):
    """What a recurrent layer puts out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


OPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(64, 96), (4, 24, 64)),
    "linear": (lambda: Op(lambda x, w: F.linear(x, w), (96, 64)), (96, 64)),
    "with a bias": (lambda: Op(lambda x, w, b: F.linear(x, w, bias=b), (96, 64), (96,)), (96, 64)),
    "matmul": (lambda: Op(lambda x, w: x @ w, (64, 96)), (4, 24, 64)),
    "from the left": (lambda: Op(lambda x, w: w @ x, (96, 64)), (3, 64, 40)),
    "mm": (lambda: Op(torch.mm, (64, 96)), (96, 64)),
    "bmm": (lambda: Op(torch.bmm, (4, 64, 48)), (4, 48, 64)),
    "einsum": (lambda: Op(lambda x, w: torch.einsum("bik, bkj -> bij", x, w), (4, 64, 48)), (4, 48, 64)),
    "addmm": (lambda: Op(lambda x, w, b: torch.addmm(b, x, w), (64, 96), (96,)), (96, 64)),
    "scaled": (lambda: Op(lambda x, w, b: torch.addmm(b, x, w, beta=2, alpha=0.5), (64, 96), (96,)), (96, 64)),
    "baddbmm": (lambda: Op(lambda x, w, b: torch.baddbmm(b, x, w), (4, 64, 48), (4, 48, 48)), (4, 48, 64)),
    "Conv1d": (lambda: nn.Conv1d(16, 32, 3), (4, 16, 100)),
    "Conv2d": (lambda: nn.Conv2d(8, 16, 3, 2, 1), (4, 8, 32, 32)),
    "of groups": (lambda: nn.Conv2d(8, 16, 3, groups=2), (4, 8, 32, 32)),
    "Conv3d": (lambda: nn.Conv3d(4, 8, 3), (2, 4, 8, 12, 12)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 8, 3, 2), (2, 16, 12, 12)),
    "RNN": (lambda: First(nn.RNN(32, 48)), (12, 8, 32)),
    "LSTM": (lambda: First(nn.LSTM(32, 48, 2, bidirectional=True)), (12, 8, 32)),
    "GRU": (lambda: First(nn.GRU(32, 48, 2, batch_first=True)), (12, 8, 32)),
    "two layers": (lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), (96, 64)),
    "attention": (lambda: First(nn.MultiheadAttention(64, 4, batch_first=True)), (4, 32, 64)),
}  # fmt: skip


def leave_linear_layers_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no layer of few rows take the kernel of those."""
    for module in (own_ops, mode):
        monkeypatch.setattr(module, "takes_linear", lambda *_: False)


class Calls:
    """Counts products that are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(products, "SMALLEST", dict.fromkeys(products.SMALLEST, 1))
        leave_linear_layers_to_torch(monkeypatch)
        for name in ("in_fp32", "wide_linear"):
            monkeypatch.setattr(products, name, self.counted(getattr(products, name)))

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.count += 1
            return function(*args)

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def prepared(model: nn.Module, low: torch.dtype, more: str = "") -> nn.Module:
    return mezzo.prepare(model, None, NAMES[low] + more).model


def needs_emulation(low: torch.dtype) -> None:
    if not is_emulated(low):
        pytest.skip("the processor has units for it")


def run(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, First) and isinstance(model.layer, nn.MultiheadAttention):
        return model.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
    return model(x)  # type: ignore[no-any-return]


def trained(model: nn.Module, x: Tensor, low: torch.dtype | None = None) -> list[Tensor]:
    """Return output, and gradients of input and weights; under torch.autocast to a dtype, if one is given."""
    given = x.clone().requires_grad_()
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        out = run(model, given)
    out.to(x.dtype).sin().sum().backward()
    grads = [one.grad for one in (given, *model.parameters())]
    return [out.detach(), *[one for one in grads if one is not None]]


def rounded(model: nn.Module, low: torch.dtype) -> nn.Module:
    exact = copy.deepcopy(model).double()
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(low).double()
    return exact


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())


@LOW
@pytest.mark.parametrize("op", OPS)
def test_everything_is_no_farther_from_fp64_than_torchs(op: str, low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)
    if op == "LSTM" and not has_lstm_kernel(low):
        pytest.skip("torch has no kernel for it, and a rule runs it in fp32")
    torch.manual_seed(0)
    make, shape = OPS[op]
    model, x = make(), torch.randn(shape)
    theirs = trained(copy.deepcopy(model), x, low)
    exact = trained(rounded(model, low), x.to(low).double())
    ours = trained(prepared(model, low, ", output=none"), x)
    assert calls.count >= 1
    assert ours[0].dtype is theirs[0].dtype
    for own, their, true in zip(ours, theirs, exact, strict=True):
        assert own.dtype is their.dtype
        assert own.shape == their.shape
        assert distance(own, true) <= max(1.05 * distance(their, true), 2 * relative(low) * float(true.norm()))
    assert torch.is_autocast_enabled("cpu") is False


@LOW
@pytest.mark.usefixtures("calls")
def test_gradients_of_fp32_weights_are_not_rounded(low: torch.dtype) -> None:
    needs_emulation(low)
    model, x = nn.Linear(64, 96), torch.randn(96, 64)
    grad = trained(prepared(model, low), x)[2]
    assert not torch.equal(grad, grad.to(low).float())


@LOW
@pytest.mark.parametrize(("rows", "width"), [(3, 30), (300, 30), (5000, 30), (3, 300), (30, 5000), (300, 600)])
def test_the_longer_is_taken_in_parts(
    rows: int, width: int, low: torch.dtype, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers whatever the parts: gradients of the shorter alone are a sum over them."""
    needs_emulation(low)
    monkeypatch.setattr(products, "REUSE", 0)
    model, x = nn.Linear(40, width), torch.randn(rows, 40)
    whole = trained(prepared(copy.deepcopy(model), low), x)
    monkeypatch.setattr(wide, "AT_ONCE", 0)
    parts = trained(prepared(model, low), x)
    assert calls.count == 2
    for one, other in zip(whole, parts, strict=True):
        assert distance(one, other) <= max(rows, width) * 2**-22 * float(other.norm())


@LOW
def test_few_rows_widen_some_of_a_large_weight(low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a small weight some of many rows."""
    needs_emulation(low)
    leave_linear_layers_to_torch(monkeypatch)
    monkeypatch.setattr(wide, "AT_ONCE", 1 << 18)
    for rows, width in ((64, 8192), (8192, 64)):
        kept = wide._Memory()
        monkeypatch.setattr(wide, "_memory", kept)
        trained(prepared(nn.Linear(512, width), low), torch.randn(rows, 512))
        assert kept.tensors
        assert sum(one.nbytes for one in kept.tensors.values()) <= 8192 * 512 * 4 / 4


def saved_bytes(model: nn.Module, x: Tensor) -> dict[torch.dtype, int]:
    found: dict[int, tuple[torch.dtype, int]] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            kept.append(tensor)
            found[address] = tensor.dtype, tensor.untyped_storage().nbytes()
        return tensor

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return {
        dtype: sum(size for kind, size in found.values() if kind is dtype) for dtype in {d for d, _ in found.values()}
    }


@LOW
@pytest.mark.parametrize("op", ["linear", "matmul", "mm", "addmm", "Conv1d", "Conv2d", "Conv3d", "transposed", "bmm"])
@pytest.mark.usefixtures("calls")
def test_operands_wait_in_16_bit_and_weights_as_they_are_stored(op: str, low: torch.dtype) -> None:
    needs_emulation(low)
    make, shape = OPS[op]
    x = torch.randn(shape)
    assert saved_bytes(prepared(make(), low, ", output=none"), x) == {low: 2 * x.numel()}
