"""RMS norm on the CPU, and gradients of layer norm: the compiled kernel against fp64 and torch's chain of ops, its threads, its operands, and who must not meet it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step.step_models import Dtypes
from tests.tolerance import distance
from torch import Tensor

from mezzo.errors import OperandError
from mezzo.kernels import registry, rms_norm, takes_rms_norm
from mezzo.kernels.ops import layer_norm as reference
from mezzo.kernels.ops.layer_norm import cpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.skipif(
    registry.choose("layer_norm", torch.device("cpu"), BF16).backend != "cpu", reason="no compiler"
)
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP16)]
SHAPES = [(1, 1), (3, 7), (1, 64), (5, 3, 65), (700, 128), (3, 5000), (2, 130, 512)]


def ours(x: Tensor, weight: Tensor | None, low: torch.dtype, eps: float = 1e-6) -> Tensor:
    assert takes_rms_norm(x, [x.shape[-1]], weight, low)
    return rms_norm(x, [x.shape[-1]], weight, eps, low, training=True)


def chain(x: Tensor, weight: Tensor | None, low: torch.dtype, eps: float = 1e-6) -> Tensor:
    """As models write it, in fp32 throughout."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.float()).to(low)


def exact(x: Tensor, weight: Tensor | None, low: torch.dtype, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, [x.shape[-1]], weight, eps)


def gradients(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor | None, grad: Tensor, low: torch.dtype
) -> list[Tensor]:
    given = [one.detach().clone().requires_grad_() for one in (x, weight) if one is not None]
    out = function(given[0], given[1] if weight is not None else None, low)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "low"), DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [FP32, None, "low"], ids=str)
def test_it_is_rounded_once_and_no_farther_from_fp64_than_the_single_ops(
    shape: tuple[int, ...], dtype: torch.dtype, low: torch.dtype, weight_dtype: Any
) -> None:
    x, grad = (
        (torch.randn(shape) * torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))).to(dtype),
        torch.randn(shape).to(low),
    )
    weight = None if weight_dtype is None else torch.randn(shape[-1]).to(low if weight_dtype == "low" else FP32)
    wide = [None if one is None else one.double() for one in (x, weight)]
    want = gradients(exact, *wide, grad.double(), low)
    found, single = (gradients(of, x, weight, grad, low) for of in (ours, chain))
    assert [one.dtype for one in found] == [low, dtype, *([] if weight is None else [weight.dtype])]
    eps = torch.finfo(low).eps
    tiny = torch.finfo(low).smallest_normal * eps
    assert bool(((found[0].double() - want[0]).abs() <= (eps / 2 + 2**-20) * want[0].abs() + tiny).all())
    for one, other, true in zip(found, single, want, strict=True):
        noise = 2.0**-22 * float(true.norm()) * (1 + (true is want[1]) * shape[-1] ** 0.5)
        assert distance(one, true) <= 1.02 * distance(other, true) + noise


@pytest.mark.parametrize(("dtype", "low"), DTYPES, ids=str)
def test_threads_change_no_bit(dtype: torch.dtype, low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, grad = torch.randn(900, 200).to(dtype), torch.randn(200), torch.randn(900, 200).to(low)
    once = gradients(ours, x, weight, grad, low)
    for threads in (1, 3, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(map(torch.equal, once, gradients(ours, x, weight, grad, low)))


@pytest.mark.parametrize("layout", ["transposed", "every second", "expanded gradient"])
def test_however_operands_lie_the_results_are_the_same(layout: str) -> None:
    x, weight, grad = torch.randn(40, 6, 32).to(BF16), torch.randn(32), torch.randn(40, 6, 32).to(BF16)
    if layout == "expanded gradient":
        grad = grad[:1, :1].expand(40, 6, 32)
    laid = {
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "every second": lambda t: torch.stack([t, t], -1)[..., 0],
        "expanded gradient": lambda t: t.contiguous(),
    }[layout]
    want = gradients(ours, x, weight, grad.contiguous(), BF16)
    given = [laid(x).detach().requires_grad_(), weight.clone().requires_grad_()]
    out = ours(*given, BF16)
    assert torch.equal(out, want[0])
    assert all(map(torch.equal, torch.autograd.grad(out, given, laid(grad)), want[1:]))


@pytest.mark.parametrize(("where", "value"), list(itertools.product(["input", "gradient"], [torch.inf, torch.nan])))
def test_inf_and_nan_arrive_where_those_of_the_single_ops_do(where: str, value: float) -> None:
    x, weight, grad = torch.randn(9, 70).to(BF16), torch.randn(70), torch.randn(9, 70).to(BF16)
    (x if where == "input" else grad)[3, 5] = value
    for one, other in zip(gradients(ours, x, weight, grad, BF16), gradients(chain, x, weight, grad, BF16), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


def test_subnormals_are_kept_by_every_thread() -> None:
    """Whatever the calling one was told: a result does not depend on who computes a row."""
    x, weight = torch.randn(2000, 100), torch.full((100,), 1e-40)
    want = ours(x, weight, BF16)
    assert want.any()
    try:
        assert torch.set_flush_denormal(True)
        assert torch.equal(ours(x, weight, BF16).view(torch.int16), want.view(torch.int16))
    finally:
        torch.set_flush_denormal(False)


def test_a_second_derivative_is_that_of_the_formula() -> None:
    x, weight = torch.randn(6, 40).to(BF16), torch.randn(40)

    def penalty(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [one.to(dtype if dtype is torch.float64 else one.dtype).requires_grad_() for one in (x, weight)]
        first = torch.autograd.grad(function(*given, BF16).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum((one.square().sum() for one in first), torch.zeros(())), given)

    for one, true in zip(penalty(ours, BF16), penalty(exact, torch.float64), strict=True):
        assert distance(one, true) <= 0.02 * float(true.norm())


def test_what_waits_for_backward_is_the_input_and_a_number_for_each_row() -> None:
    saved: list[Tensor] = []
    x, weight = torch.randn(300, 64).to(BF16).requires_grad_(), torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(x, weight, BF16)
    assert sorted(one.nbytes for one in saved) == [0, 64 * 4, 300 * 4, 300 * 64 * 2]


NOT_TAKEN: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "fp64": lambda x, w: {"x": x.double()},
    "another 16-bit dtype": lambda x, w: {"x": x.to(FP16)},
    "no elements": lambda x, w: {"x": x[:0]},
    "another width": lambda x, w: {"x": x[:, :31]},
    "a weight in fp64": lambda x, w: {"weight": w.double()},
    "a weight of another shape": lambda x, w: {"weight": w[:31]},
    "a weight elsewhere": lambda x, w: {"weight": w.to("meta")},
    "an input elsewhere": lambda x, w: {"x": x.to("meta")},
    "a subclass": lambda x, w: {"x": torch.Tensor._make_subclass(type("Other", (Tensor,), {}), x)},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_it_is_not_for_is_left_to_torch(name: str) -> None:
    x, weight = torch.randn(4, 32).to(BF16), torch.randn(32)
    good = {"x": x, "shape": [32], "weight": weight, "low": BF16}
    assert takes_rms_norm(**good)
    assert not takes_rms_norm(**{**good, **NOT_TAKEN[name](x, weight)})


class Muls(Dtypes):
    OPS = ("mul",)


def test_who_watches_ops_gets_torchs() -> None:
    x, weight, seen = torch.randn(4, 32).to(BF16).requires_grad_(), torch.randn(32, requires_grad=True), []
    out = ours(x, weight, BF16)
    want = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)[0]
    with Muls() as ops:
        seen.append(takes_rms_norm(x, [32], weight, BF16))
        (found,) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    torch.func.vmap(lambda row: seen.append(takes_rms_norm(row, [32], weight, BF16)) or row)(x)
    assert seen == [False, False] and ops.seen
    torch.testing.assert_close(found, want)
    (batched,) = torch.autograd.grad(out, x, torch.ones_like(out).expand(3, 4, 32), is_grads_batched=True)
    torch.testing.assert_close(batched[1], want)


def test_hooks_that_give_back_something_else_are_refused_before_anything_is_read() -> None:
    x, weight = torch.randn(4, 32).to(BF16).requires_grad_(), torch.randn(32, requires_grad=True)
    for wrong in (lambda t: t[:1], lambda t: t.half()):
        with torch.autograd.graph.saved_tensors_hooks(wrong, lambda t: t):
            loss = ours(x, weight, BF16).sum()
        with pytest.raises(OperandError, match="gradients of an RMS norm cannot be computed: its"):
            loss.backward()


def test_a_gradient_in_another_dtype_than_the_result_is_refused() -> None:
    x, weight, rstd = torch.randn(4, 32), torch.randn(32), torch.ones(4, 1)
    with pytest.raises(OperandError, match="its gradient is fp32"), torch.no_grad():
        cpu.backward(x, x, [32], rstd, rstd, weight, None, [True, True, False], 1e-6, False)


@pytest.mark.parametrize("shape", [(40, 512), (700, 65), (2, 130, 128)], ids=str)
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("given", ["weight and bias", "weight", "none"])
def test_gradients_of_layer_norm_are_those_of_fp64_rounded_once(
    shape: tuple[int, ...], low: torch.dtype, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far from it as torch's kernel on widened inputs, whatever the number of threads, without copies in fp32."""
    x, grad, size = (3 * torch.randn(shape) + 5).to(low), torch.randn(shape).to(low), [shape[-1]]
    weight, bias = (torch.randn(size) if name in given else None for name in ("weight", "bias"))
    wide = [one.double().requires_grad_() for one in (x, weight, bias) if one is not None]
    out = F.layer_norm(wide[0], size, *wide[1:])
    want = torch.autograd.grad(out, wide, grad.double())
    _, mean, rstd = cpu.forward(x, size, weight, bias, 1e-5, True, low)
    kept = grad, x, size, mean, rstd, weight, bias, [True, weight is not None, bias is not None], 1e-5, True
    with torch.no_grad():
        found, theirs = ([one for one in kernel.backward(*kept) if one is not None] for kernel in (cpu, reference))
        for threads in (1, 3, 50):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            again = [one for one in cpu.backward(*kept) if one is not None]
            assert all(map(torch.equal, found, again))
    assert found[0].dtype is low and len(found) == len(want)
    for one, other, true in zip(found, theirs, want, strict=True):
        assert distance(one, true) <= 1.02 * distance(other.to(one.dtype), true) + 1e-6 * float(true.norm())


def test_zeros_without_memory_are_left_to_torch() -> None:
    assert not takes_rms_norm(torch._efficientzerotensor((3, 8)), [8], None, BF16)
