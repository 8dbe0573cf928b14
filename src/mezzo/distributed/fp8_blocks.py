"""Gradients in fp8: blocks of 128 with a power of two each, and what rounding took away, which the next step sends."""

from __future__ import annotations

import torch
from torch import Tensor

from .wide_sum import Codec

BLOCK = 128
"""Elements that share a scale: 1 + 1/128 bytes an element."""
_TOP = 9
"""448, the largest number of e4m3, is 0.875 times two to this."""


def encode(rows: Tensor) -> Tensor:
    """Return values in fp8, blocks of a row first, then the exponents of their scales: 255 for a block with an inf or NaN.

    Shape (N, P), fp32, P a multiple of `BLOCK`, to shape (N, P + P / 128), uint8. Syncs: no.
    """
    blocks = rows.view(len(rows), -1, BLOCK)
    largest = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)
    # The least power of two under which the largest value is no larger than 448; not below 2^-126, whose bits are a scale's.
    stored = (exponent - _TOP + (mantissa > 0.875) + 127).clamp(1, 254)
    stored = torch.where(largest.isfinite(), stored, 255).to(torch.int32)
    small = (blocks * _power_of_two(254 - stored.clamp(max=253)).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return torch.cat([small.view(torch.uint8).flatten(1), stored.to(torch.uint8)], dim=1)


def num_packed(numel: int, num_ranks: int) -> int:
    """Return the bytes of a bucket's values, in as many rows as ranks, with their exponents."""
    whole = num_ranks * BLOCK
    return -(-numel // whole) * num_ranks * (BLOCK + 1)


def decode(packed: Tensor) -> Tensor:
    """Return the values that `encode` packed: shape (N, P), fp32; inf or NaN all over a block that had one. Syncs: no."""
    num_blocks = packed.shape[1] // (BLOCK + 1)
    values = packed[:, : num_blocks * BLOCK].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scales = _power_of_two(packed[:, num_blocks * BLOCK :].to(torch.int32))
    return (values.view(len(packed), -1, BLOCK) * scales.unsqueeze(-1)).flatten(1)


def _power_of_two(stored: Tensor) -> Tensor:
    """Return 2^(e - 127) for exponents as fp32 stores them, int32; inf for 255."""
    return (stored << 23).view(torch.float32)


class Fp8Blocks(Codec):
    """How one bucket of gradients travels in fp8: with the remainders of the step before, here and of this rank's part of the sum.

    Nothing is lost for good: what rounding took from a step is added to the next. Remainders belong to gradients of one loss
    scale and are not saved.
    """

    multiple = BLOCK

    def __init__(self) -> None:
        self._own: Tensor | None = None
        self._sum: Tensor | None = None

    def pack(self, rows: Tensor) -> Tensor:
        """Return what is sent: of shape (N, P), fp32, to uint8. Writes: `rows`. Syncs: no."""
        packed, self._own = _rounded(rows, self._own)
        return packed

    def add_up(self, received: Tensor) -> Tensor:
        """Return the sum over ranks of what each sent: shape (P,), fp32. Syncs: no."""
        return decode(received).sum(0)

    def pack_sum(self, mean: Tensor) -> Tensor:
        """Return this rank's part of the mean as it is gathered: shape (P,), fp32, to uint8. Writes: `mean`. Syncs: no."""
        packed, self._sum = _rounded(mean.unsqueeze(0), self._sum)
        return packed[0]

    def unpack(self, rows: Tensor) -> Tensor:
        """Return the mean, one row from each rank, as fp32. Syncs: no."""
        return decode(rows)


def _rounded(rows: Tensor, remainder: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows and remainder in fp8, and what that took away: 0 in a block that is not finite. Writes: `rows`."""
    if remainder is not None:
        rows.add_(remainder)
    packed = encode(rows)
    return packed, (rows - decode(packed)).nan_to_num_(0.0, 0.0, 0.0)
