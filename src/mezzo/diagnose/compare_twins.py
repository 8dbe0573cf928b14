"""Twins: beside the values a run computes, the values fp32 would hold in the same memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .ledger import Ledger
from .records import Phase

_MASK = 2.0**127
"""fp32 magnitudes from here on stand for infinity, as `torch.finfo(dtype).min` does in a mask."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Whose own ops wrote a tensor.

    Attributes:
        phase: forward, backward or optimizer; empty for values that were there before the run.
        root: class name of the outermost module, empty outside.
        module: name below the root.
    """

    phase: Phase | None = None
    root: str = ""
    module: str = ""

    def is_same_module(self, other: Maker) -> bool:
        """Whether both are one module, in whatever phase."""
        return self.phase is not None and (self.root, self.module) == (other.root, other.module)


@dataclass(slots=True)
class Twin:
    """What fp32 would hold in one storage, as flat tensors of as many elements.

    Attributes:
        maker: who wrote it last.
        own: had the maker computed in fp32 on the inputs it was given.
        whole: had everything been computed in fp32.
        is_counted: somebody read it as the maker's result, and its error was noted.
    """

    maker: Maker
    own: Tensor
    whole: Tensor
    is_counted: bool = False


def _flat(tensor: Tensor) -> Tensor:
    """Return the whole storage behind a tensor, as a view."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def _at(flat: Tensor, like: Tensor) -> Tensor | None:
    """Return the view of a twin that lies where `like` lies; None if its memory was made larger since."""
    last = like.storage_offset() + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    if like.numel() and last >= flat.numel():
        return None
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())


def power(reference: Tensor, actual: Tensor) -> tuple[float, float]:
    """Return the energies of a signal and of the error of another tensor that should equal it.

    Elements that the reference itself has as inf or NaN, or as a mask, are left out. An element that is not finite
    where the reference is makes the error infinite.

    Args:
        reference: any shape; fp32 or wider.
        actual: the same shape; any floating dtype.

    Returns:
        Sum of squares of the reference and of the difference, computed in fp64.

    Syncs: yes.
    """
    signal, noise = _energy(reference), _energy(actual.detach().to(reference.dtype) - reference)
    if signal < _MASK and math.isfinite(noise):
        return signal, noise
    keep = reference.isfinite() & (reference.abs() < _MASK)
    reference, actual = reference[keep], actual.detach()[keep].to(reference.dtype)
    noise = _energy(actual - reference)
    return _energy(reference), noise if math.isfinite(noise) else math.inf


def _energy(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2


def decibels(signal: float, noise: float) -> float:
    """Return the signal-to-error ratio in dB: inf without error, -inf without signal or with infinite error.

    >>> decibels(100.0, 1.0), decibels(1.0, 0.0)
    (20.0, inf)
    """
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 or math.isinf(noise) else 10 * math.log10(signal / noise)


@dataclass(slots=True)
class Tally:
    """Energies of signal and error, summed over tensors: local, inherited, total.

    Attributes:
        signal: three sums.
        noise: three sums.
        count: tensors taken in.
    """

    signal: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    noise: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    count: int = 0

    def add(self, actual: Tensor, own: Tensor, whole: Tensor) -> None:
        """Take in a tensor, with what it would be from the same inputs, and altogether. Syncs: yes."""
        pairs = ((own, actual), (whole, own), (whole, actual))
        for i, (signal, noise) in enumerate(power(*pair) for pair in pairs):
            self.signal[i] += signal
            self.noise[i] += noise
        self.count += 1

    def merge(self, other: Tally) -> None:
        """Take in what another tally took in. Writes: this one."""
        for i in range(3):
            self.signal[i] += other.signal[i]
            self.noise[i] += other.noise[i]
        self.count += other.count

    @property
    def local_share(self) -> float:
        """Local error over signal, in energy."""
        return self.noise[0] / self.signal[0] if self.signal[0] else math.inf if self.noise[0] else 0.0


class Twins:
    """A twin for each storage that holds something else than fp32 would.

    Memory that is not known holds exactly what fp32 would hold. Views need no note: a twin has the layout of the
    storage, so a view of one is the same view of the other. Syncs: no.
    """

    def __init__(self) -> None:
        self._known: Ledger[Twin] = Ledger()

    def __contains__(self, tensor: Tensor) -> bool:
        return self._known.get(tensor) is not None

    def own(self, tensor: Tensor, here: Maker) -> Tensor | None:
        """Return what a tensor would be had the module `here` computed in fp32; None if that is what it is."""
        twin = self._known.get(tensor)
        return _at(twin.own, tensor) if twin is not None and here.is_same_module(twin.maker) else None

    def whole(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor would be had everything been computed in fp32; None if that is what it is."""
        twin = self._known.get(tensor)
        return None if twin is None else _at(twin.whole, tensor)

    def put(self, tensor: Tensor, here: Maker, own: Tensor, whole: Tensor) -> None:
        """Note what a tensor that was just written would hold.

        Args:
            tensor: as the run wrote it, all of its storage or a part.
            here: who wrote it.
            own: shape of `tensor`; see `Twin`.
            whole: likewise.
        """
        if tensor.numel() == 0:
            return
        old, actual = self._known.get(tensor), _flat(tensor).float()
        if old is not None and _at(old.whole, tensor) is None:
            old = None
        keeps_own = old is not None and old.maker == here
        twin = Twin(
            maker=here,
            own=old.own if old is not None and keeps_own else actual.clone(),
            whole=old.whole if old is not None else actual.clone(),
        )
        for flat, values in ((twin.own, own), (twin.whole, whole)):
            view = _at(flat, tensor)
            assert view is not None  # made from this storage
            view.copy_(values)
        self._known.note(tensor, twin)

    def tally(self, tensor: Tensor) -> Tally:
        """Return the error of one tensor. Syncs: yes."""
        twin, tally, actual = self._known.get(tensor), Tally(), tensor.detach()
        own, whole = (None, None) if twin is None else (_at(twin.own, tensor), _at(twin.whole, tensor))
        tally.add(actual, actual.float() if own is None else own, actual.float() if whole is None else whole)
        return tally

    def take(self, tensor: Tensor) -> tuple[Maker, Tally] | None:
        """Return the error of a whole storage and who made it, once; None if it is known or nobody made it.

        Syncs: yes.
        """
        twin = self._known.get(tensor)
        if twin is None or twin.is_counted or twin.maker.phase is None:
            return None
        twin.is_counted = True
        tally = Tally()
        tally.add(_flat(tensor)[: twin.own.numel()], twin.own, twin.whole)
        return twin.maker, tally

    def maker(self, tensor: Tensor) -> Maker:
        """Return who wrote a tensor last."""
        twin = self._known.get(tensor)
        return Maker() if twin is None else twin.maker

    def seed(self, tensor: Tensor, whole: Tensor) -> None:
        """Note that a tensor was rounded before the run began."""
        self.put(tensor, Maker(), tensor.detach().float(), whole.detach().float())
