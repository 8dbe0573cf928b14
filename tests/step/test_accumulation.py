"""Findings that the host knows and findings on a device mean the same; clipping and dividing touch each gradient once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from mezzo.errors import StepError
from mezzo.step.accumulation import check_loss, clamp_, either, is_bad, multiply_, without

FLAGS = {True: (True, torch.tensor(1.0)), False: (False, torch.tensor(0.0))}


@pytest.mark.parametrize(("one", "other"), list(itertools.product([True, False], repeat=2)))
def test_flags_are_joined_alike_wherever_they_lie(one: bool, other: bool) -> None:
    for a, b in itertools.product(FLAGS[one], FLAGS[other]):
        assert bool(either(a, b)) is (one or other)
        assert bool(without(a, b)) is (one and not other)
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            assert isinstance(either(a, b), bool), "the host goes on knowing"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, -2.5, math.inf, -math.inf, math.nan])
def test_a_number_is_bad_if_it_is_not_finite(value: float, dtype: torch.dtype) -> None:
    assert bool(is_bad(torch.tensor(value, dtype=dtype), torch.device("cpu"))) is not math.isfinite(value)


LOSS = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "wanted", "words"),
    [
        (torch.ones(2, requires_grad=True), torch.float32, r"takes one floating number with its graph, not fp32\[2\]"),
        (1.5, torch.float32, "not float"),
        (torch.tensor(3), torch.float32, "not int64"),
        (torch.ones(()), torch.float32, "no parameter leads to"),
        ((LOSS * 1).half(), torch.float32, "a fp16 loss, and the policy declares loss=fp32"),
        ((LOSS * 1).half(), torch.float16, ""),
        ((LOSS * 1).double(), torch.float32, ""),
        ((LOSS * 1).reshape(1), torch.float32, ""),
    ],
)
def test_a_loss_is_one_number_with_a_graph_and_wide_enough(loss: object, wanted: torch.dtype, words: str) -> None:
    if not words:
        check_loss(loss, wanted)  # type: ignore[arg-type]
        return
    with pytest.raises(StepError, match=words):
        check_loss(loss, wanted)  # type: ignore[arg-type]


def gradients() -> list[Tensor]:
    rows = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([[4.0], [-8.0]]), (3, 1), check_invariants=True)
    return [torch.tensor([1.0, -3.0]), torch.tensor([6.0]).bfloat16(), rows.coalesce()]


def test_a_gradient_in_two_lists_is_multiplied_once() -> None:
    grads = gradients()
    multiply_([*grads, grads[0]], torch.tensor(0.5))
    assert [grad.to_dense().flatten().tolist() for grad in grads] == [[0.5, -1.5], [3.0], [2.0, 0.0, -4.0]]


@pytest.mark.parametrize(("scale", "factor"), [(None, 1.0), (torch.tensor(2.0), 2.0)])
def test_values_are_clamped_as_they_are_without_the_scale(scale: Tensor | None, factor: float) -> None:
    grads = gradients()
    clamp_(grads, 2.0, scale)
    for grad, before in zip(grads, gradients(), strict=True):
        assert torch.equal(grad.to_dense(), before.to_dense().clamp(-2 * factor, 2 * factor))


def test_complex_gradients_have_no_order_and_nothing_is_clamped() -> None:
    grads = [torch.tensor([5.0]), torch.tensor([3 + 4j])]
    with pytest.raises(StepError, match="would clamp complex gradients"):
        clamp_(grads, 1.0, None)
    assert grads[0].item() == 5.0
