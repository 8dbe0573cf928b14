"""Gradients of convolutions on the CPU: the compiled kernel against fp64 and torch's own, where it is taken, and where it must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step.step_models import Dtypes
from tests.tolerance import distance, relative
from torch import Tensor

from mezzo.errors import OperandError
from mezzo.kernels import convolution, registry, takes_convolution
from mezzo.kernels.ops import convolution as door
from mezzo.kernels.ops.convolution import cpu

BF16 = torch.bfloat16
IS_COMPILED = registry.choose("convolution", torch.device("cpu"), BF16).backend == "cpu"
needs_pairs = pytest.mark.skipif(
    not (IS_COMPILED and cpu.is_faster()), reason="the processor multiplies no pairs of bf16, or tiles, or no compiler"
)
Operands = tuple[Tensor, Tensor, Tensor | None]


def operands(shape: tuple[int, ...], has_bias: bool = True) -> Operands:
    batch, inside, outside, height, width, rows, columns = shape
    x, weight = torch.randn(batch, inside, height, width), torch.randn(outside, inside, rows, columns)
    given = (x.to(BF16), weight.to(BF16), torch.randn(outside).to(BF16) if has_bias else None)
    for one in given:
        if one is not None:
            one.requires_grad_()
    return given


def gradients(out: Tensor, given: Operands, grad: Tensor) -> list[Tensor]:
    wanted = [one for one in given if one is not None and one.requires_grad]
    return list(torch.autograd.grad(out, wanted, grad))


def wide(given: Operands) -> Operands:
    x, weight, bias = [None if one is None else one.detach().double().requires_grad_() for one in given]
    assert x is not None
    assert weight is not None
    return x, weight, bias


SHAPES = [  # batch, channels in and out, height, width, rows and columns of the kernel; stride; padding
    ((2, 8, 32, 8, 8, 3, 3), (1, 1), (1, 1)),
    ((4, 64, 64, 16, 16, 3, 3), (1, 1), (1, 1)),
    ((32, 64, 128, 4, 4, 3, 3), (1, 1), (1, 1)),
    ((4, 64, 128, 8, 8, 3, 3), (2, 2), (1, 1)),
    ((4, 64, 128, 8, 8, 1, 1), (2, 2), (0, 0)),
    ((1, 3, 5, 7, 9, 3, 3), (1, 1), (0, 0)),
    ((1, 16, 16, 1, 1, 1, 1), (1, 1), (0, 0)),
    ((3, 13, 33, 11, 6, 5, 3), (2, 1), (2, 1)),
    ((5, 17, 47, 9, 13, 7, 7), (1, 3), (3, 3)),
    ((2, 9, 65, 5, 5, 5, 5), (1, 1), (3, 0)),
    ((2, 24, 40, 2, 2, 7, 7), (1, 1), (3, 3)),
    ((2, 8, 32, 17, 33, 4, 4), (4, 4), (0, 0)),
    ((2, 8, 32, 6, 6, 1, 1), (1, 1), (3, 3)),
    ((3, 20, 36, 40, 40, 3, 3), (3, 2), (2, 2)),
    ((5, 150, 33, 33, 32, 3, 3), (1, 1), (1, 1)),
]


@needs_pairs
@pytest.mark.parametrize(("shape", "stride", "padding"), SHAPES, ids=str)
def test_gradients_are_no_farther_from_fp64_than_torchs(
    shape: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    given = operands(shape)
    out, theirs = convolution(*given, stride, padding), F.conv2d(*given, stride, padding)
    assert torch.equal(out, theirs)
    grad = torch.randn(out.shape).to(BF16)
    exact = wide(given)
    want = gradients(F.conv2d(*exact, stride, padding), exact, grad.double())
    ours, others = gradients(out, given, grad), gradients(theirs, given, grad)
    assert torch.equal(ours[0], others[0])
    for own, other, true in zip(ours[1:], others[1:], want[1:], strict=True):
        assert own.shape == other.shape
        assert own.stride() == other.stride()
        assert own.dtype is BF16
        assert distance(own, true) <= 1.02 * distance(other, true) + 1e-5 * float(true.norm())


@needs_pairs
@pytest.mark.parametrize(("shape", "stride", "padding"), SHAPES, ids=str)
def test_each_number_is_a_sum_in_fp32_rounded_once(
    shape: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    given = operands(shape)
    out = convolution(*given, stride, padding)
    grad = torch.randn(out.shape).to(BF16)
    _, *ours = gradients(out, given, grad)
    exact, sizes = wide(given), wide(tuple(None if one is None else one.abs() for one in given))  # type: ignore[arg-type]
    _, *want = gradients(F.conv2d(*exact, stride, padding), exact, grad.double())
    _, *sums = gradients(F.conv2d(*sizes, stride, padding), sizes, grad.double().abs())
    count = shape[0] * out.shape[2] * out.shape[3]
    for own, true, total in zip(ours, want, sums, strict=True):
        assert ((own - true).abs() <= 2**-8 * true.abs() + count * 2**-24 * total).all()


@needs_pairs
@pytest.mark.parametrize("frozen", ["x", "bias", "both"])
def test_what_wants_no_gradient_gets_none(frozen: str) -> None:
    given = operands((2, 16, 32, 8, 8, 3, 3))
    for index, name in ((0, "x"), (2, "bias")):
        if frozen in (name, "both"):
            given[index].requires_grad_(False)  # type: ignore[union-attr]
    out = convolution(*given, (1, 1), (1, 1))
    grad = torch.randn(out.shape).to(BF16)
    full = operands((2, 16, 32, 8, 8, 3, 3))
    for one, other in zip(full, given, strict=True):
        one.data.copy_(other.data)  # type: ignore[union-attr]
    everything = dict(zip("xwb", gradients(convolution(*full, (1, 1), (1, 1)), full, grad), strict=True))
    names = {"x": "wb", "bias": "xw", "both": "w"}[frozen]
    assert all(map(torch.equal, gradients(out, given, grad), [everything[name] for name in names]))


@needs_pairs
def test_without_bias_the_weight_has_the_same_gradient() -> None:
    x, weight, bias = operands((4, 16, 48, 8, 8, 3, 3))
    grad = torch.randn(4, 48, 8, 8).to(BF16)
    found = [
        gradients(convolution(*given, (1, 1), (1, 1)), given, grad)[1]
        for given in ((x, weight, bias), (x, weight, None))
    ]
    assert torch.equal(*found)


@needs_pairs
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands((6, 40, 72, 9, 9, 3, 3))
    grad = torch.randn(6, 72, 9, 9).to(BF16)

    def found() -> list[Tensor]:
        return gradients(convolution(*given, (1, 1), (1, 1)), given, grad)[1:]

    once = found()
    for threads in (1, 3, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(map(torch.equal, once, found()))


@needs_pairs
@pytest.mark.parametrize("layout", ["channels last", "expanded", "columns"])
def test_however_the_gradient_lies_it_is_the_same(layout: str) -> None:
    given = operands((4, 16, 32, 8, 8, 3, 3))
    grad = torch.randn(4, 32, 8, 8).to(BF16)
    if layout == "expanded":
        grad = grad[..., :1, :1].expand(-1, -1, 8, 8)
    lies: dict[str, Callable[[Tensor], Tensor]] = {
        "channels last": lambda x: x.to(memory_format=torch.channels_last),
        "expanded": lambda x: x,
        "columns": lambda x: torch.cat([x, x], -1)[..., 8:],
    }
    found = [
        gradients(convolution(*given, (1, 1), (1, 1)), given, one) for one in (grad.contiguous(), lies[layout](grad))
    ]
    assert all(map(torch.equal, *found))


@needs_pairs
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["x", "gradient"])
def test_inf_and_nan_arrive_where_they_belong(where: str, value: float) -> None:
    given = operands((3, 16, 32, 6, 6, 3, 3))
    grad = torch.randn(3, 32, 6, 6).to(BF16)
    with torch.no_grad():
        (given[0] if where == "x" else grad)[2, 5, 0, 0] = value  # met by four of nine taps
    met = torch.zeros(32, 16, 3, 3, dtype=torch.bool)
    (met[:, 5, :2, :2] if where == "x" else met[5, :, 1:, 1:]).fill_(True)
    of_weight, of_bias = gradients(convolution(*given, (1, 1), (1, 1)), given, grad)[1:]
    assert torch.equal(of_weight.isfinite(), ~met)
    assert of_bias.isfinite().sum() == (32 if where == "x" else 31)


@needs_pairs
def test_a_second_derivative_is_torchs() -> None:
    given = operands((2, 8, 32, 6, 6, 3, 3))

    def penalty(out: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)  # type: ignore[arg-type]
        return torch.autograd.grad(sum((one.float().square().sum() for one in first), torch.zeros(())), given)  # type: ignore[arg-type]

    for one, other in zip(penalty(convolution(*given, (1, 1), (1, 1))), penalty(F.conv2d(*given, 1, 1)), strict=True):
        assert torch.equal(one, other)


class Backward(Dtypes):
    OPS = ("convolution_backward",)


@needs_pairs
def test_who_watches_ops_sees_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    given, grad = operands((8, 64, 64, 16, 16, 3, 3)), torch.randn(8, 64, 16, 16).to(BF16)
    assert takes_convolution(*given, (1, 1), (1, 1))
    out = convolution(*given, (1, 1), (1, 1))
    monkeypatch.setattr(cpu, "weight_gradient", None)
    with Backward() as seen:
        assert not takes_convolution(*given, (1, 1), (1, 1))
        found = gradients(out, given, grad)
    assert [dtype for _, dtype in seen.seen] == [BF16]
    assert all(map(torch.equal, found, gradients(F.conv2d(*given, 1, 1), given, grad)))


@needs_pairs
def test_batched_gradients_are_those_of_one_after_the_other() -> None:
    given, grads = operands((2, 8, 32, 6, 6, 3, 3)), torch.randn(3, 2, 32, 6, 6).to(BF16)
    out = convolution(*given, (1, 1), (1, 1))
    (found,) = torch.autograd.grad(out, given[1:2], grads, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(
            one,
            torch.autograd.grad(out, given[1], grad, retain_graph=True)[0],
            rtol=relative(BF16),
            atol=relative(BF16),
        )


REFUSED: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "three dimensions": lambda x, w: {"input": x[0]},
    "other channels": lambda x, w: {"input": x[:, :32].contiguous()},
    "channels last": lambda x, w: {"input": x.to(memory_format=torch.channels_last)},
    "a weight that is channels last": lambda x, w: {
        "weight": w.detach().to(memory_format=torch.channels_last).requires_grad_()
    },
    "a frozen weight": lambda x, w: {"weight": w.detach()},
    "large pictures": lambda x, w: {"input": torch.zeros(8, 64, 64, 64, dtype=BF16)},
    "many pixels that one tap meets": lambda x, w: {
        "input": torch.zeros(33, 64, 32, 32, dtype=BF16),
        "weight": torch.zeros(64, 64, 2, 2, dtype=BF16, requires_grad=True),
        "stride": (2, 2),
    },
    "one picture": lambda x, w: {"input": x[:1]},
    "few channels": lambda x, w: {"input": x[:, :3].contiguous(), "weight": w[:, :3].contiguous()},
    "few products": lambda x, w: {"input": x[:2, :, :1, :1].contiguous()},
    "no pictures": lambda x, w: {"input": x[:0]},
    "no outputs": lambda x, w: {"input": x[..., :2, :2].contiguous(), "padding": (0, 0)},
}


@needs_pairs
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_for_is_left_to_torch(name: str) -> None:
    x, weight, _ = operands((8, 64, 64, 16, 16, 3, 3))
    good = {"input": x, "weight": weight, "bias": None, "stride": (1, 1), "padding": (1, 1)}
    assert takes_convolution(**good)  # type: ignore[arg-type]
    assert not takes_convolution(**{**good, **REFUSED[name](x, weight)})  # type: ignore[arg-type]
    with torch.no_grad():
        assert not takes_convolution(**good)  # type: ignore[arg-type]


def test_without_a_compiled_kernel_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "compiled", lambda op: None)
    x, weight, _ = operands((8, 64, 64, 16, 16, 3, 3))
    assert not takes_convolution(x, weight, None, (1, 1), (1, 1))


@needs_pairs
def test_hooks_that_give_back_something_else_are_refused_before_anything_is_read() -> None:
    given = operands((2, 8, 32, 6, 6, 3, 3))
    for wrong in (lambda t: t[:1, :1], lambda t: t.double(), lambda t: t.to("meta")):
        with torch.autograd.graph.saved_tensors_hooks(wrong, lambda t: t):
            loss = convolution(*given, (1, 1), (1, 1)).sum()
        with pytest.raises(OperandError, match="gradients of a convolution cannot be computed: its"):
            loss.backward()  # type: ignore[no-untyped-call]


@needs_pairs
def test_an_input_written_since_is_refused() -> None:
    given = operands((2, 8, 32, 6, 6, 3, 3))
    x = given[0] * 1
    loss = convolution(x, *given[1:], (1, 1), (1, 1)).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@needs_pairs
def test_nothing_more_waits_for_backward_than_with_torchs() -> None:
    given = operands((2, 8, 32, 6, 6, 3, 3))

    def kept(run: Callable[..., Tensor]) -> list[int]:
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            run(*given, (1, 1), (1, 1))
        return sorted(one.data_ptr() for one in held)

    assert kept(convolution) == kept(F.conv2d)
