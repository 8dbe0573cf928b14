"""Rounding to 16 bit without losing what lies below the last place, stochastically or with compensation, and the random bits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ....formats import format_of

_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF

Whole = TypeVar("Whole", int, Tensor)


def mix(x: Whole) -> Whole:
    """Scatter whole numbers in [0, 2**32), ints or int64, over the same range; a bijection. Syncs: no.

    Source: the 32-bit finaliser "lowbias32" of Wellons, Prospecting for Hash Functions, 2018.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


@dataclass(frozen=True, slots=True, eq=False)
class EndToEnd:
    """Where the elements of several tensors belong that lie end to end in one.

    Attributes:
        seeds: shape (n,), int64: of the random bits of each parameter of a step.
        owner: shape (elements,), int64: which of these each element is of.
        index: shape (elements,), int64: in the whole of which its tensor is a part.
    """

    seeds: Tensor
    owner: Tensor
    index: Tensor


def param_seed(seed: int, number: int) -> int:
    """Return the seed of one parameter's random bits, from a seed for all and its number among them."""
    return mix((mix(seed) + number) & _MASK)


def random_key(seed: Whole, step: Tensor, stream: int = 0) -> Tensor:
    """Return what tells the random bits of one parameter, step and stream from any other; of several: the shape of `step`.

    `seed`, in [0, 2**32), names the parameter, and `stream` one of several draws for it. `step`, a whole number of any dtype, has shape (),
    or (n,) for several parameters, whose int64 seeds have it too. The key is int64, in [0, 2**32), on the device of `step`. Syncs: no.
    """
    return mix((step.to(torch.int64) * _GOLDEN + mix((seed + stream * _GOLDEN) & _MASK)) & _MASK)


def random_bits(key: Tensor, like: Tensor, offset: int | EndToEnd = 0) -> Tensor:
    """Return 32 random bits for each element, int64 in [0, 2**32): a pure function of key and place. Syncs: no.

    Nothing is drawn from a generator and nothing advances: the same step gives the same bits again, on
    every device, on every rank, after every resume.

    Args:
        key: shape (), int64, from `random_key`; the device of `like`. Of several tensors end to end: (n,).
        like: any shape; only shape and device are used. Places count in row-major order.
        offset: index of the first element, where `like` is a part of something larger; of several tensors end to end, where
            each element belongs.
    """
    if isinstance(offset, EndToEnd):
        return mix((offset.index & _MASK) ^ key.index_select(0, offset.owner))
    index = torch.arange(offset, offset + like.numel(), dtype=torch.int64, device=like.device).view(like.shape) & _MASK
    return mix(index ^ key)


def stochastic_round(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round fp32 to one of the two neighbours in a 16-bit format, to each with the chance that makes the mean exact. Syncs: no.

    Of `bits`, of any integer dtype, the low 16 are used, each value equally likely. Values of the format, inf and NaN are kept;
    beyond the largest value the upper neighbour is inf. Another dtype is a FormatError.
    """
    fmt = format_of(dtype)
    dropped = 23 - fmt.mantissa_bits
    low = (bits & 0xFFFF).to(torch.int32) >> (16 - dropped)
    up = (x.view(torch.int32) + low) >> dropped << dropped
    rounded = torch.where(x.isfinite(), up.view(torch.float32), x)
    if dtype is torch.float16:
        # Below its smallest normal value fp16 has one spacing, 2^-24, where fp32 still has 2^-37 and less.
        steps = torch.floor(x.abs() * (1.0 / fmt.smallest) + low.to(torch.float32) * 2.0**-dropped)
        rounded = torch.where(x.abs() < fmt.tiny, torch.copysign(steps * fmt.smallest, x), rounded)
    return rounded.to(dtype)


def compensate(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keep an fp32 master as a 16-bit weight and the 16-bit rounding of its error, both rounded to nearest even; 0 where the weight is not finite.

    Their sum is within half a spacing of the compensation from `master`. Syncs: no.
    Source: Kahan 1965; as one correction a step, Zamirai et al. 2020, Revisiting BFloat16 Training.
    """
    weight = master.to(dtype)
    rest = (master - weight.to(torch.float32)).to(dtype)
    return weight, torch.where(weight.isfinite(), rest, torch.zeros_like(rest))


def restore(weight: Tensor, compensation: Tensor) -> Tensor:
    """Return the fp32 master that a 16-bit weight and its compensation stand for. Syncs: no.

    The weight is what counts: where the compensation is more than half a spacing of it, because somebody
    wrote the weight since `compensate`, the master is the weight itself.
    """
    wide, rest = weight.to(torch.float32), compensation.to(torch.float32)
    belongs = rest.abs() <= wide.abs() * (format_of(weight.dtype).eps / 2)
    return torch.where(belongs, wide + rest, wide)
