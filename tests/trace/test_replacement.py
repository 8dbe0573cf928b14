"""What is offered in place of an op that failed is, evaluated as it is printed, finite where the op was not, gradients too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mezzo.trace.replacement import OpInputs, Replacement, bound, fused_with, replacement_for, saved_operands, works

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ONE = {
    "log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0, "sqrt": 0.0, "rsqrt": 0.0, "acos": 1.0, "asin": -1.0,
    "atanh": 1.0, "logit": 1.0, "reciprocal": 0.0,
}  # fmt: skip


def leaf(*values: float, dtype: torch.dtype = FP32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def evaluated(text: str, **names: Tensor) -> Tensor:
    out = eval(text, {"torch": torch, **vars(torch), **names})
    assert isinstance(out, Tensor)
    return out


def assert_sound(out: Tensor, *leaves: Tensor) -> None:
    grads = torch.autograd.grad(out.float().sum(), leaves, allow_unused=True)
    assert out.isfinite().all() and all(g is None or g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("op", ONE)
def test_an_op_of_one_operand(op: str, dtype: torch.dtype) -> None:
    x = leaf(ONE[op], 0.5, dtype=dtype)
    text = replacement_for(op, OpInputs([x], []))
    assert text, op
    assert_sound(evaluated(text, x=x), x)
    plain = 1 / x if op == "reciprocal" else getattr(torch, op)(x)
    (grad,) = torch.autograd.grad(plain.float().sum(), x)
    assert not (plain.isfinite().all() and grad.isfinite().all())
    assert evaluated(text, x=x)[1] == plain[1]  # where it was sound it is what it was


@pytest.mark.parametrize(
    ("divisor", "is_count", "text"),
    [
        ([0.0, 2.0], True, "x / y.clamp(min=1)"),
        ([0.0, 0.5], True, "x / y.clamp(min=1e-06)"),
        ([0.0, 2.0], False, "x / y.clamp(min=1e-06)"),
        ([0.0, -2.0], False, "x / torch.where(y.abs() < 1e-06, 1e-06, y)"),
    ],
)
def test_a_quotient(divisor: list[float], is_count: bool, text: str) -> None:
    x, y = leaf(0.0, 1.0), torch.tensor(divisor)
    assert replacement_for("div", OpInputs([x, y], [], is_count)) == text
    assert_sound(evaluated(text, x=x, y=y), x)


def test_a_count_of_whole_numbers_is_at_least_one() -> None:
    x, y = leaf(0.0, 1.0), torch.tensor([0, 3])
    assert replacement_for("div", OpInputs([x, y], [])) == "x / y.clamp(min=1)"


def test_a_power() -> None:
    x, p = leaf(0.0, 2.0), leaf(0.5, 0.5)
    assert_sound(evaluated(replacement_for("pow", OpInputs([x], [0.5])), x=x), x)
    assert_sound(evaluated(replacement_for("pow", OpInputs([x, p], [])), x=x, p=p), x, p)
    assert replacement_for("pow", OpInputs([x], [])) == ""


@pytest.mark.parametrize(
    ("op", "inputs"),
    [("mul", [leaf(0.0)]), ("log", []), ("log", [leaf(math.inf)]), ("div", [leaf(1.0)]), ("log", [torch.tensor([0])])],
)
def test_nothing_is_offered_where_nothing_is_known(op: str, inputs: list[Tensor]) -> None:
    assert replacement_for(op, OpInputs(inputs, [])) == ""


def test_an_offer_whose_value_or_gradient_is_not_finite_or_of_no_use_is_none() -> None:
    def offer(run: object) -> Replacement:
        return Replacement("f(x)", run)  # type: ignore[arg-type]

    x = leaf(0.0, 1.0)
    assert works(offer(lambda x: x + 1), [x])
    assert not works(offer(lambda x: x.log()), [x])
    assert not works(offer(lambda x: x.sqrt()), [x])
    assert not works(offer(lambda x: x * 1e13), [x])
    assert works(offer(lambda x: x.sqrt()), [x.detach()])


def test_it_runs_under_a_trace_as_outside() -> None:
    import mezzo

    x = leaf(0.0, 0.5)
    with mezzo.diagnose.trace():
        assert replacement_for("sqrt", OpInputs([x], [])) == "x.clamp(min=1e-12).sqrt()"
    assert bound(FP16) > bound(BF16) == bound(FP32)


def test_a_logarithm_is_fused_with_what_made_its_argument() -> None:
    x = leaf(1.0, 2.0)
    made = [
        ("log_softmax", x.softmax(0)), ("logsigmoid", 1 - x.sigmoid()), ("logsumexp", x.exp().sum(0) + 1e-8),
        ("logsumexp", (x * x.exp() / 2).sum(0)), ("torch.linalg.slogdet(a).logabsdet", torch.outer(x, x).det().abs()),
        ("the sum of logarithms", (1 - x.sigmoid()).cumprod(0)), ("the sum of logarithms", x.prod()),
        ("torch.special.log_ndtr", 0.5 * (1 + torch.erf(x / 2**0.5))), ("", x.square().sum(0)), ("", (x * x).sum(0)),
    ]  # fmt: skip
    for name, argument in made:
        assert fused_with("log", argument).partition(" in place")[0].partition(",")[0] == name
        assert fused_with("sqrt", argument) == ""
    assert fused_with("log", x) == ""


def test_operands_are_read_from_the_graph_until_it_is_freed() -> None:
    x, y = leaf(4.0), leaf(2.0)
    for out, want in ((x / y, [4.0, 2.0]), (x.log(), [4.0]), (x.sqrt(), [4.0])):
        assert [t.item() for t in saved_operands(out.grad_fn).tensors] == want
    power = x.pow(3.0)
    assert saved_operands(power.grad_fn).numbers == [3.0]
    power.backward()
    assert saved_operands(power.grad_fn) == OpInputs([], [])
