"""Every two values of any two axes in one case at least, quickly; the other cases of the product are slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by the product of `axes`, in its order, of which `make test` runs cases that cover all pairs.

    For axes of which any two may interact, and three do by nothing of their own; a case is slow, never gone.
    """
    product = list(itertools.product(*axes.values()))
    wanted = {pair for case in product for pair in _pairs(case)}
    chosen = set()
    while wanted:  # the case that covers most of what is left, the first of equals
        best = max(product, key=lambda case: len(wanted & _pairs(case)))
        chosen.add(best)
        wanted -= _pairs(best)
    cases = [
        pytest.param(
            *case,
            id="-".join(getattr(value, "__name__", str(value)) for value in case),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in product
    ]
    return pytest.mark.parametrize(",".join(axes), cases)


def _pairs(case: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(case), 2))
