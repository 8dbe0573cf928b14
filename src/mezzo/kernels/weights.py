"""How weights are stored between steps, and the way from there to fp32 and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..policy import Master
from .parts import parts
from .rounding import compensate, noise, noise_key, restore, round_by_chance
from .split import join, split

KEPT = {"split": "remainder", "fp32": "master", "kahan": "compensation"}
"""What each master mode keeps beside the weight; the names of the entries in an optimizer's state."""
WEIGHT_NOISE, MOMENT_NOISE = 0, 1
"""Streams of noise, so that a weight and its moments do not share bits."""


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Weights:
    """Weights of one dtype and device that keep small updates in one way.

    As long as this object lives its tensors stay where they are, with what lies beside them in the optimizer's state.

    Attributes:
        mode: the master mode; "none" for weights of fp32 or fp64, which are their own master.
        values: what the model reads; any shapes, one dtype.
        kept: beside each, in its shape: int16 remainders, fp32 masters or compensations in the weights' dtype;
            empty for modes that keep nothing.
        seeds: of the noise of each, in [0, 2**32); any where nothing is rounded by chance.
        firsts: of each, the place of its first element in the whole tensor of which it is a part, for the noise; empty
            if each is whole.
        made: what kernels made of them, by name; see `once`.
    """

    mode: Master
    values: Sequence[Tensor]
    kept: Sequence[Tensor]
    seeds: Sequence[int]
    firsts: Sequence[int] = ()
    made: dict[str, object] = field(default_factory=dict, repr=False)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what a kernel makes of these weights under a name, such as a table of addresses; made on first use."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]  # type: ignore[return-value]  # what `make` of this name made

    def at(self, places: Sequence[int]) -> Weights:
        """Return the weights at some places."""
        return replace(
            self,
            values=[self.values[i] for i in places],
            kept=[self.kept[i] for i in places if self.kept],
            seeds=[self.seeds[i] for i in places],
            firsts=[self.firsts[i] for i in places if self.firsts],
            made={},
        )

    def first(self, place: int) -> int:
        """Return the place of a weight's first element in the whole of which it is a part; 0 if it is one itself."""
        return self.firsts[place] if self.firsts else 0


def read_master(mode: Master, value: Tensor, kept: Tensor | None) -> Tensor:
    """Return the master of one weight.

    The weight is what counts: where what is kept beside it no longer rounds to it, because somebody wrote the
    weight since the last step, the master is the weight.

    Args:
        mode: how the weight keeps small updates.
        value: the weight, any shape.
        kept: what lies beside it; None for modes that keep nothing.

    Returns:
        The shape of `value`; fp32, fp64 for an fp64 weight. Fresh memory unless the weight is its own master.

    Syncs: no.
    """
    if kept is None:
        return value.to(torch.promote_types(value.dtype, torch.float32))
    if mode == "split":
        return join(value, kept)
    if mode == "kahan":
        return restore(value, kept)
    return torch.where(kept.to(value.dtype) == value, kept, value.to(torch.float32))


def store_master(
    mode: Master, master: Tensor, dtype: torch.dtype, key: Tensor | None, first: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return the weight that stands for a master, and what must be kept beside it.

    Args:
        mode: how the weight keeps small updates.
        master: any shape; fp32, or fp64 for an fp64 weight.
        dtype: of the weight.
        key: of the noise, for mode "stochastic"; None rounds to nearest there too.
        first: place of the first element, for the noise, where the master is a part of something larger.

    Returns:
        The weight in `dtype`, and what lies beside it, None for modes that keep nothing.

    Syncs: no.
    """
    if mode == "split":
        return split(master)
    if mode == "kahan":
        return compensate(master, dtype)
    if mode == "stochastic" and key is not None:
        return round_by_chance(master, dtype, noise(key, master, first)), None
    return master.to(dtype), master if mode == "fp32" else None


def give_master_(mode: Master, weight: Tensor, master: Tensor) -> Tensor | None:
    """Have a weight stand for a master, in memory that is there.

    Args:
        mode: how the weight keeps small updates.
        weight: what the model reads, any shape.
        master: the same shape and device, fp32.

    Returns:
        What lies beside the weight: fresh memory, laid out as `master`; None for modes that keep nothing.

    Writes: `weight`. Syncs: no.
    """
    dtype = {"split": torch.int16, "fp32": torch.float32, "kahan": weight.dtype}.get(mode)
    kept = None if dtype is None else torch.empty_like(master, dtype=dtype)
    for piece, value, *beside in parts(master, weight, *([] if kept is None else [kept])):
        found = store_master(mode, piece, weight.dtype, None)
        for target, source in zip((value, *beside), found, strict=False):
            if source is not None:
                target.copy_(source)
    return kept


def write_(target: Tensor, value: Tensor, blocked: Tensor | None) -> None:
    """Write a value, unless the step is blocked: then the target keeps every bit. Writes: `target`. Syncs: no.

    Args:
        target: any shape and dtype.
        value: the shape of `target`, the same dtype.
        blocked: shape () or (1,), bool, same device; None: not blocked.
    """
    target.copy_(value if blocked is None else torch.where(blocked.reshape(()), target, value))


def write_master_(weights: Weights, place: int, master: Tensor, step: Tensor, blocked: Tensor | None) -> None:
    """Store a new master as weight and what is kept beside it, unless the step is blocked.

    Args:
        weights: where to.
        place: which of them.
        master: the new master, its shape.
        step: shape (): steps taken, this one included; decides the noise.
        blocked: as in `write_`.

    Writes: the weight and what is kept beside it. Syncs: no.
    """
    value = weights.values[place]
    key = noise_key(weights.seeds[place], step, WEIGHT_NOISE) if weights.mode == "stochastic" else None
    weight, kept = store_master(weights.mode, master, value.dtype, key, weights.first(place))
    write_(value, weight, blocked)
    if kept is not None:
        write_(weights.kept[place], kept, blocked)
