"""Gradients that fp16 flushed to 0 and that fp32 would have had."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import dtype_name, format_of, widest
from .measure import amax
from .ops import Call
from .records import Flush, FlushedGradient, Site
from .reference_path import run_in_fp32
from .storage_notes import StorageNotes
from .wide_values import WideValues

_NARROW = torch.float16
"""The format whose gradients flush; bf16 has the exponents of fp32."""
_SAFE = 2.0**-8
"""A tensor that reaches this far has its smallest fp16 number 16 binades below its largest value."""
_KEPT = 0.05
"""Share of the lost values that may stay lost at the scale that is proposed."""


class FlushWatch:
    """Follows gradients in fp32 from the op that flushed them to the parameter that gets 0."""

    def __init__(self) -> None:
        self._wide = WideValues()
        self._flushes: StorageNotes[tuple[Flush, float]] = StorageNotes()

    def clear(self) -> None:
        """Start anew, for another step."""
        self._wide, self._flushes = WideValues(), StorageNotes()

    def see(self, call: Call, site: Site, tops: list[float]) -> None:
        """Take in one op of backward. Syncs: yes."""
        if site.phase != "backward":
            return
        known = {id(t): v for _, t in call.inputs if (v := self._wide.get(call.original(t))) is not None}
        if not all(map(math.isfinite, tops)) or (
            not known and not any(_may_flush(t, top) for t, top in zip(call.out, tops, strict=True))
        ):
            self._forget(call)
            return
        wide = run_in_fp32(call, known)
        if wide is None:
            self._forget(call)
            return
        inherited = next((f for _, t in call.inputs if (f := self._flushes.get(call.original(t))) is not None), None)
        for tensor, value in zip(call.out, wide, strict=True):
            lost = (tensor == 0) & (value != 0) & value.isfinite()
            if bool(lost.any()):
                share = int(lost.sum()) / lost.numel()
                here = Flush(
                    site=site,
                    kernel=call.facts.kernel,
                    dtype=dtype_name(_NARROW),
                    share=share,
                    wide_amax=amax(value[lost]),
                    constant=None,
                )
                # the op that lost most is the one to name
                is_worse = tensor.dtype is _NARROW and (inherited is None or share > 2 * inherited[0].share)
                self._flushes.note(tensor, (here, _rescue(value, lost)) if is_worse or inherited is None else inherited)
                self._wide.put(tensor, value)
            elif known:
                self._wide.put(tensor, value)
                if inherited is not None:
                    self._flushes.note(tensor, inherited)
            else:
                self._forget(call)

    def _forget(self, call: Call) -> None:
        if len(self._wide):
            for tensor in call.out:
                self._wide.forget(tensor)
                self._flushes.forget(tensor)

    def lost(self, name: str, gradient: Tensor, loss_scale: float, step: int) -> FlushedGradient:
        """Return how much of a parameter's gradient was flushed. Syncs: yes."""
        wide, found = self._wide.get(gradient), self._flushes.get(gradient)
        flushed = 0 if wide is None else int(((gradient == 0) & (wide != 0)).sum())
        return FlushedGradient(
            name=name,
            numel=gradient.numel(),
            flushed=flushed,
            flush=found[0] if found is not None and flushed else None,
            loss_scale=loss_scale,
            wanted_scale=loss_scale * found[1] if found is not None else loss_scale,
            step=step,
        )


def _may_flush(tensor: Tensor, top: float) -> bool:
    """Say whether zeros of a gradient may be flushed numbers: it holds some, and its other values reach down to them."""
    if tensor.dtype is not _NARROW or top >= _SAFE or not tensor.numel() or not bool((tensor == 0).any()):
        return False
    sizes = tensor.abs()
    return top == 0 or bool(((sizes > 0) & (sizes < format_of(_NARROW).tiny)).any())


def _rescue(wide: Tensor, lost: Tensor) -> float:
    """Return the power of two that keeps nearly all lost values, as far as the largest value lets it."""
    facts = format_of(_NARROW)
    small = wide[lost].abs().to(widest(wide.device)).flatten()
    smallest = float(small.kthvalue(max(1, math.ceil(_KEPT * small.numel()))).values)
    wanted = math.ceil(math.log2(facts.smallest / smallest))
    room = math.floor(math.log2(facts.max / amax(wide.nan_to_num(0.0, 0.0, 0.0)))) - 1
    return 2.0 ** max(1, min(wanted, room))
