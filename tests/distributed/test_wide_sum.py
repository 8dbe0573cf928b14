"""Sums of 16-bit gradients over many ranks: as close to the mean as their own rounding, however many ranks there are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.distributed import wide_sum
from mezzo.distributed.wide_sum import WideReplicas, add_up, split


def _shares(num_ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what each rank sends of a mean, shape (N, n), and the mean in fp64: gradients of one sign and size in common."""
    generator = torch.Generator().manual_seed(num_ranks)
    common = torch.randn(4096, generator=generator, dtype=torch.float64)
    grads = common + 0.5 * torch.randn(num_ranks, 4096, generator=generator, dtype=torch.float64)
    return (grads.float() / num_ranks).to(dtype), grads.mean(0)


def _error(mean: Tensor, exact: Tensor) -> float:
    return ((mean.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def _ring(shares: Tensor) -> Tensor:
    """Add up as a ring does: from rank to rank, rounded at each."""
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_does_not_grow_with_the_ranks(dtype: torch.dtype) -> None:
    rounding = torch.finfo(dtype).eps / 2
    for num_ranks in (4, 64, 256):
        shares, exact = _shares(num_ranks, dtype)
        assert _error(add_up(shares).to(dtype), exact) < rounding
    assert _error(_ring(shares), exact) > 4 * _error(add_up(shares).to(dtype), exact)


def test_what_is_rounded_once_is_exact_before() -> None:
    shares, _ = _shares(64, torch.bfloat16)
    assert torch.equal(add_up(shares).bfloat16(), shares.double().sum(0).bfloat16())


@pytest.mark.parametrize("numel", [0, 1, 63, 64])
def test_every_rank_has_a_row_and_nothing_is_lost(numel: int) -> None:
    values = torch.arange(1.0, numel + 1)
    rows = split(values, 4)
    assert rows.shape == (4, -(-numel // 4))
    assert torch.equal(rows.reshape(-1)[:numel], values)
    assert rows.sum() == values.sum()


@pytest.mark.usefixtures("one_rank")
def test_the_error_of_a_rank_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks the group up to log the error, and raised that it did not find it."""

    def lost(*_: object) -> Tensor:
        raise RuntimeError("connection closed by peer 1")

    replicas = WideReplicas(dist.new_group([0]))
    monkeypatch.setattr(wide_sum, "_part_of_sum", lost)
    with pytest.raises(RuntimeError, match="closed by peer 1"):
        dist.all_reduce(torch.ones(4, dtype=torch.bfloat16), group=replicas)
