"""Buffers that rest in 16 bit: whether what rounding moved there is seen in what they are used for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .._torch import version
from ..formats import LOW_DTYPES, format_of
from .measure import amax
from .ops import Call
from .reference_path import ReferencePath
from .wide_values import StorageNotes, WideValues, forget_results, run_in_fp32

_FOLLOWED = frozenset({
    "to", "mul", "div", "neg", "mm", "bmm", "cat", "stack", "clone", "copy", "repeat", "index", "index_select", "gather", "embedding",
})  # fmt: skip
"""Ops that make phases of frequencies and positions."""
_OF_PHASES = frozenset({"sin", "cos", "polar"})
_OFF = 0.1
"""Radians by which a phase is off where rounding is seen in it."""
_GAPS = 0.02
"""Share by which a row of whole numbers may be longer or shorter than its last and first say."""


def exact_integers(dtype: torch.dtype) -> float:
    """Return the number up to which a format holds every integer.

    >>> exact_integers(torch.float16), exact_integers(torch.bfloat16)
    (2048.0, 256.0)
    """
    return 2.0 / format_of(dtype).eps


Loss = tuple[torch.dtype, str, float]
"""What was lost in a buffer: in which format, what, and how many or how much."""


class BuffersAtRest:
    """Follows 16-bit buffers into the phases computed from them, with what they were before a cast, or might have been."""

    def __init__(self, reference: ReferencePath) -> None:
        self._reference = reference
        self._seen: StorageNotes[int] = StorageNotes()
        self._held: StorageNotes[tuple[str, torch.dtype]] = StorageNotes()
        self._as_is, self._before = WideValues(), WideValues()

    def enter(self, root: nn.Module) -> Iterator[Loss]:
        """Look over the buffers of a model that is about to run, which were written since. Syncs: yes."""
        for name, buffer in root.named_buffers():
            wide = self._reference.get(buffer) if buffer.is_floating_point() else None
            is_low = buffer.dtype in LOW_DTYPES and buffer.numel() > 0
            if not (is_low or wide is not None) or self._seen.get(buffer) == version(buffer):
                continue
            self._seen.note(buffer, version(buffer))
            lost = 0 if wide is None else int(((buffer == 0) & (wide != 0)).sum())
            dtype = buffer.dtype if is_low else self._reference.low
            if lost:
                yield dtype, f"buffer {name}, of which a cast made {lost / buffer.numel():.0%} 0,", float(lost)
            if is_low:
                if _is_row_of_integers(buffer):
                    yield dtype, f"buffer {name}, whole numbers up to {amax(buffer):g},", amax(buffer)
                self._held.note(buffer, (name, dtype))
                self._as_is.put(buffer, buffer.float())
                self._before.put(buffer, _unrounded(buffer) if wide is None else wide)

    def see(self, call: Call) -> Iterator[Loss]:
        """Take in one op of a forward. Syncs: where it takes the sine or cosine of what comes from such a buffer."""
        held = self._held.first(call.originals)
        if held is None or call.facts.name not in _FOLLOWED | _OF_PHASES:
            forget_results(call, self._held)
            return
        as_is, before = self._as_is.known(call), self._before.known(call)
        if call.facts.name in _OF_PHASES:
            pairs = ((before[key], as_is[key]) for key in as_is.keys() & before.keys())
            if (off := max((amax(b - a) for b, a in pairs), default=0.0)) > _OFF:
                yield held[1], f"buffer {held[0]}, by which phases are {off:.2g} radians off,", off
            return
        now, then = run_in_fp32(call, as_is), run_in_fp32(call, before)
        if now and then:
            self._as_is.put_results(call, now)
            self._before.put_results(call, then)
            for tensor in call.out:
                self._held.note(tensor, held)


def _is_row_of_integers(buffer: Tensor) -> bool:
    """Say whether a buffer counts, as positions do, beyond where its format has every number. Syncs: yes."""
    row = buffer.detach().squeeze()
    if row.dim() != 1 or row.numel() <= exact_integers(buffer.dtype):
        return False
    wide = row.float()
    steps = wide.diff()
    counts = bool((wide == wide.round()).all()) and bool((steps >= 0).all()) and bool((steps == 0).any())
    return counts and abs(float(wide[-1] - wide[0]) / (row.numel() - 1) - 1) < _GAPS


def _unrounded(buffer: Tensor) -> Tensor:
    """Return numbers that may have been rounded to a buffer's: those that use the last bits of its format moved by a quarter of its spacing. Syncs: no."""
    wide, eps = buffer.detach().float(), format_of(buffer.dtype).eps
    coarse = wide.to(torch.float32).frexp().mantissa / eps / 2
    return torch.where(coarse == coarse.round(), wide, wide * (1 + eps / 4))
