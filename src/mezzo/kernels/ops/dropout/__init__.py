"""Dropout on the CPU: torch's random numbers, to the bit and in torch's order, drawn in a fraction of the time."""

from __future__ import annotations

from torch import Tensor

from ...._torch import is_unwatched
from ...dtensor import PLAIN
from ...operands import FORMATS
from ...registry import compiled

SMALLEST = 1 << 13
"""Elements from which on reading and writing the generator's state, 25 us, is made up for."""


def takes_dropout(input: Tensor, p: float) -> bool:
    """Whether `dropout` takes an input, is the faster one, and is seen by nobody. Host only."""
    return (
        input.numel() >= SMALLEST
        and 0 < p < 1
        and type(input) in PLAIN
        and input.is_cpu
        and input.dtype in FORMATS
        and is_unwatched()
        and draws_faster()
    )


def draws_faster() -> bool:
    """Whether mezzo draws the random numbers of torch's dropout faster than torch does on this CPU. Host only."""
    kernel = compiled("dropout")
    return kernel is not None and bool(kernel.is_faster())


def dropout(input: Tensor, p: float) -> Tensor:
    """Return what torch's dropout with probability p returns in training, to the bit, of an input for which `takes_dropout` says yes.

    For backward waits, as with torch's, what is multiplied with. Writes: the state of torch's default generator. Syncs: no.
    """
    out: Tensor = input * compiled("dropout").noise(input, p)
    return out
