"""What several optimizers and ranks find together: norms that count each gradient once, flags that any rank raises."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.step.combine import Findings, combine
from mezzo.step.gradients import OptimizerGrads, grads_of

CPU = torch.device("cpu")


def optimizers(*params: list[nn.Parameter]) -> list[OptimizerGrads]:
    return grads_of({k: torch.optim.SGD(own) for k, own in enumerate(params)}, None)


def weight(*grad: float) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(len(grad)))
    p.grad = torch.tensor(grad)
    return p


def rank(*, has_parts: bool, flags: Tensor, squares: Tensor) -> Any:
    """Return a consensus with one other rank, which found these."""
    return SimpleNamespace(
        has_parts=has_parts,
        num_copies=1,
        combine=lambda own, own_squares: (torch.maximum(own, flags), own_squares + squares),
    )


def fine(grads: list[OptimizerGrads]) -> Findings:
    return Findings(False, False, False, [False for _ in grads])


def test_one_optimizer_has_one_norm() -> None:
    grads = optimizers([weight(3.0), weight(4.0)])
    found, norms = combine(fine(grads), grads, CPU, None, 1)
    assert found == fine(grads) and [float(n) for n in norms] == [5.0]


def test_a_shared_gradient_counts_once_in_the_norm_of_all() -> None:
    shared = weight(3.0)
    grads = optimizers([shared, weight(4.0)], [shared, weight(12.0)])
    norms = combine(fine(grads), grads, CPU, None, 2)[1]
    torch.testing.assert_close(torch.stack(norms), torch.tensor([5.0, math.sqrt(153), 13.0]))


def test_parts_of_several_ranks_are_one_norm() -> None:
    """The other rank holds 12 of the first optimizer, and shares nothing."""
    grads = optimizers([weight(3.0), weight(4.0)])
    other = rank(has_parts=True, flags=torch.zeros(4), squares=torch.tensor([144.0, 144.0]))
    norms = combine(fine(grads), grads, CPU, other, 1)[1]
    torch.testing.assert_close(torch.stack(norms), torch.tensor([13.0]))


def test_copies_on_several_ranks_count_once() -> None:
    grads = optimizers([weight(3.0), weight(4.0)])
    other = rank(has_parts=False, flags=torch.zeros(4), squares=torch.zeros(2))
    assert [float(n) for n in combine(fine(grads), grads, CPU, other, 1)[1]] == [5.0]


@pytest.mark.parametrize("index, name", list(enumerate(["early", "loss", "buffers"])))
def test_what_another_rank_found_counts_here(index: int, name: str) -> None:
    grads = optimizers([weight(1.0)])
    flags = torch.zeros(4)
    flags[index] = 1.0
    found, _ = combine(fine(grads), grads, CPU, rank(has_parts=False, flags=flags, squares=torch.zeros(2)), 1)
    assert [bool(getattr(found, one)) for one in ("early", "loss", "buffers")] == [k == index for k in range(3)]
    assert not any(map(bool, found.optimizers)) and not found.elsewhere


def test_an_optimizer_that_has_no_gradients_here_may_have_bad_ones_elsewhere() -> None:
    """Flags are those of the prepared optimizers, not of those with gradients on this rank."""
    second = grads_of({1: torch.optim.SGD([weight(1.0)])}, None)
    flags = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
    found, _ = combine(fine(second), second, CPU, rank(has_parts=False, flags=flags, squares=torch.zeros(3)), 2)
    assert not bool(found.optimizers[0]) and bool(found.elsewhere)


def test_finite_parts_whose_squares_add_up_beyond_fp32_are_bad() -> None:
    grads = optimizers([weight(1.5e19)])
    other = rank(has_parts=True, flags=torch.zeros(4), squares=torch.tensor([2.25e38, 2.25e38]))
    found, _ = combine(fine(grads), grads, CPU, other, 1)
    assert bool(found.optimizers[0]) and bool(found.elsewhere)


def test_what_is_found_here_is_said_of_the_optimizer_it_is_about() -> None:
    second = grads_of({1: torch.optim.SGD([weight(1.0)])}, None)
    own = Findings(False, False, False, [True])
    found, _ = combine(own, second, CPU, rank(has_parts=False, flags=torch.zeros(5), squares=torch.zeros(3)), 2)
    assert bool(found.optimizers[0]) and bool(found.elsewhere)
