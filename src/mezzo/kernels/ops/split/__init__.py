"""A bf16 weight and an int16 remainder that together are an fp32 master: integer arithmetic on the bits of fp32, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 1 << 15


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Take an fp32 master apart into the bf16 weight nearest to it and what is left.

    Args:
        master: any shape; fp32. A NaN loses sign and payload, every other value is kept exactly.

    Returns:
        The weight, bf16: `master` rounded to nearest, ties away from zero; inf above bf16's range.
        The remainder, int16, in units of the last place of fp32. Shape and strides of `master`.

    Syncs: no. Source: README.md of this folder.

    >>> weight, remainder = split(torch.tensor([1.0 + 2**-9]))
    >>> weight.item(), remainder.item(), join(weight, remainder).item() == 1.0 + 2**-9
    (1.0, 16384, True)
    """
    # A NaN of all ones would round up to zero, so every NaN becomes the quiet one first.
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)
    high = (bits + _HALF) >> 16
    remainder = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Put the fp32 master together again; `join(*split(x))` is x bit for bit unless x is NaN. Syncs: no.

    The weight is what counts: the master is within half a spacing of it, and where the remainder cannot belong
    to it, because somebody wrote the weight since `split`, the master is the weight itself.
    """
    joined = ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)
    # The one way a pair can be wrong: 0 with less than nothing left, or inf with more, are the bits of a NaN.
    return torch.where(joined.isnan(), weight.to(torch.float32), joined)
