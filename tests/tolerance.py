"""Tolerances, derived from the dtype and the number of terms summed; never chosen by hand."""

from __future__ import annotations

import torch


def relative(dtype: torch.dtype, terms: int = 1) -> float:
    """Worst relative error of a sum of `terms` rounded products: gamma_n of Higham 2002, section 3.1."""
    unit = torch.finfo(dtype).eps / 2
    return terms * unit / (1 - terms * unit)


def assert_within_ulps(got: torch.Tensor, want: torch.Tensor, ulps: float) -> None:
    """Assert `got` is within `ulps` units in the last place of its own dtype from `want` (fp64 or wider)."""
    from mezzo.formats import ulp

    distance = (got.double() - want.double()).abs()
    spacing = ulp(want.to(got.dtype))
    same = (got.double() == want.double()) | (got.isnan() & want.isnan())
    worst = torch.where(same, torch.zeros_like(distance), distance / spacing)
    assert bool((worst <= ulps).all()), f"worst distance {worst.max().item():.3g} ulp, allowed {ulps}"


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the length of the difference from a tensor in fp64."""
    return float((one.detach().double() - other.detach()).norm())
