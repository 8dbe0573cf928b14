"""Clipping and dividing touch each gradient once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mezzo.errors import StepError
from mezzo.step.grad_passes import clamp_, multiply_


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
