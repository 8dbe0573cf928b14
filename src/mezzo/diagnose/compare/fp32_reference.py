"""Fp32Reference: beside the values a run computes, the values fp32 would hold in the same memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...formats import widest
from ...trace import Phase, StorageNotes, WideValues, flat

_MASK = 2.0**127
"""fp32 magnitudes from here on stand for infinity, as `torch.finfo(dtype).min` does in a mask."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Whose local ops wrote a tensor: class of the outermost module, empty outside, and name below it; no phase for values that were there before the run."""

    phase: Phase | None = None
    root: str = ""
    module: str = ""

    def is_same_module(self, other: Maker) -> bool:
        """Whether both are one module, in whatever phase."""
        return self.phase is not None and (self.root, self.module) == (other.root, other.module)


@dataclass(slots=True)
class _Made:
    """Who wrote a storage last, and whether somebody read it as the maker's result, so that its error was noted."""

    maker: Maker
    is_counted: bool = False


def power(reference: Tensor, actual: Tensor) -> tuple[float, float]:
    """Return the energies, in fp64, of a signal and of the error of another tensor of its shape that should equal it. Syncs: yes.

    Elements that the reference, fp32 or wider, itself has as inf or NaN, or as a mask, are left out. An element that is not finite
    where the reference is makes the error infinite.
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
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=widest(tensor.device))) ** 2


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
    """Energies of signal and error, summed over `count` tensors: local, inherited, total."""

    signal: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    noise: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    count: int = 0

    def add(self, actual: Tensor, local: Tensor, full: Tensor) -> None:
        """Take in a tensor, with what it would be from the same inputs, and altogether. Syncs: yes."""
        pairs = ((local, actual), (full, local), (full, actual))
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


class Fp32Reference:
    """fp32 values for each storage that holds something else than fp32 would: locally and in full.

    Local is what it would hold had its maker computed in fp32 on the inputs it was given, full had everything been. Memory
    that is not known holds exactly what fp32 would hold. Syncs: no.
    """

    def __init__(self) -> None:
        self._made: StorageNotes[_Made] = StorageNotes()
        self._local, self._full = WideValues(), WideValues()

    def __contains__(self, tensor: Tensor) -> bool:
        return self._made.get(tensor) is not None

    def local(self, tensor: Tensor, here: Maker) -> Tensor | None:
        """Return what a tensor would be had the module `here` computed in fp32; None if that is what it is. Syncs: no."""
        return self._local.get(tensor) if here.is_same_module(self.maker(tensor)) else None

    def full(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor would be had everything been computed in fp32; None if that is what it is. Syncs: no."""
        return self._full.get(tensor)

    def put(self, tensor: Tensor, here: Maker, local: Tensor, full: Tensor) -> None:
        """Note what a tensor that `here` just wrote, all of its storage or a part, would hold locally and in full. Syncs: no."""
        if tensor.numel() == 0:
            return
        if self.maker(tensor) != here:
            self._local.forget(tensor)
        self._made.note(tensor, _Made(here))
        self._local.put(tensor, local.float())
        self._full.put(tensor, full.float())

    def tally(self, tensor: Tensor) -> Tally:
        """Return the error of one tensor. Syncs: yes."""
        tally, actual = Tally(), tensor.detach()
        local, full = self._local.get(tensor), self._full.get(tensor)
        tally.add(actual, actual.float() if local is None else local, actual.float() if full is None else full)
        return tally

    def take(self, tensor: Tensor) -> tuple[Maker, Tally] | None:
        """Return the error of a full storage and who made it, once; None if it is known or nobody made it. Syncs: yes."""
        made = self._made.get(tensor)
        if made is None or made.is_counted or made.maker.phase is None:
            return None
        made.is_counted = True
        return made.maker, self.tally(flat(tensor))

    def maker(self, tensor: Tensor) -> Maker:
        """Return who wrote a tensor last. Syncs: no."""
        made = self._made.get(tensor)
        return Maker() if made is None else made.maker

    def seed(self, tensor: Tensor, full: Tensor) -> None:
        """Note that a tensor was rounded before the run began. Syncs: no."""
        self.put(tensor, Maker(), tensor.detach(), full.detach())
