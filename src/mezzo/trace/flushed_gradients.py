"""Gradients that are 0 on the way to a weight: flushed by 16 bit, or of norms and softmaxes over one number, which pass none but rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import dtype_name, format_of, widest
from .measure import amax
from .ops import Call
from .records import Flush, FlushedGradient, Site
from .wide_values import StorageNotes, WideValues, forget_results, run_in_fp32

_NARROW = torch.float16
"""The format whose gradients flush; bf16 has the exponents of fp32."""
_SAFE = 2.0**-8
"""A tensor that reaches this far has its smallest fp16 number 16 binades below its largest value."""
_KEPT = 0.05
"""Share of the lost values that may stay lost at the scale that is proposed."""
_SUMS = ("add", "cat", "stack")
_SOFTMAX = ("softmax_backward", "log_softmax_backward_data")


class FlushWatch:
    """Follows gradients in fp32 (`wide`) from the op that flushed them to the parameter that gets 0."""

    def __init__(self) -> None:
        self.constants = ConstantOps()
        self.clear()

    def clear(self) -> None:
        """Start anew, for another step."""
        self.wide, self._flushes = WideValues(), StorageNotes[tuple[Flush, float]]()
        self._zeros = StorageNotes[Site]()

    def see(self, call: Call, site: Site, tops: list[float]) -> None:
        """Take in one op of backward. Syncs: yes."""
        if site.phase != "backward":
            return
        self._follow_zeros(call, site, tops)
        self.constants.see(call, site)
        known, is_finite = self.wide.known(call), all(map(math.isfinite, tops))
        may_flush = is_finite and (known or any(map(_may_flush, call.out, tops)))
        wide = run_in_fp32(call, known) if may_flush else None
        if wide is None:
            forget_results(call, self.wide, self._flushes)
            return
        inherited = self._flushes.first(call.originals)
        for tensor, value in zip(call.out, wide, strict=True):
            flush, lost = inherited, (tensor == 0) & (value != 0) & value.isfinite()
            share = int(lost.sum()) / max(1, lost.numel())
            if not (share or known):
                self.wide.forget(tensor)
                self._flushes.forget(tensor)
                continue
            # the op that lost most is the one to name
            if share and (inherited is None or (tensor.dtype is _NARROW and share > 2 * inherited[0].share)):
                kernel, dtype, top = call.facts.kernel, dtype_name(_NARROW), amax(value[lost])
                here = Flush(site=site, kernel=kernel, dtype=dtype, share=share, wide_amax=top, constant=None)
                flush = (here, _rescue(value, lost))
            self.wide.put(tensor, value)
            if flush is not None:
                self._flushes.note(tensor, flush)

    def _follow_zeros(self, call: Call, site: Site, tops: list[float]) -> None:
        before = self._zeros.first(call.originals) or site
        for tensor, top in zip(call.out, tops, strict=True):
            if top:
                self._zeros.forget(tensor)
            else:
                self._zeros.note(tensor, before)

    def zeroed_at(self, gradient: Tensor) -> Site | None:
        """Return the op that made a gradient 0 throughout, if one did; what the program wrote itself is meant. Syncs: no."""
        site = self._zeros.get(gradient)
        return None if site is None or site.own_node else site

    def lost(self, name: str, gradient: Tensor, loss_scale: float, step: int) -> FlushedGradient:
        """Return how much of a parameter's gradient was flushed. Syncs: yes."""
        wide, found = self.wide.get(gradient), self._flushes.get(gradient)
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
    """Return the power of two that makes nearly all lost values normal numbers, as far as the largest value lets it."""
    facts = format_of(_NARROW)
    small = wide[lost].abs().to(widest(wide.device)).flatten()
    smallest = float(small.kthvalue(max(1, math.ceil(_KEPT * small.numel()))).values)
    wanted = math.ceil(math.log2(facts.tiny / smallest))
    room = math.floor(math.log2(facts.max / amax(wide.nan_to_num(0.0, 0.0, 0.0)))) - 1
    return 2.0 ** max(1, min(wanted, room))


class ConstantOps:
    """Follows what such an op hands back, 0 or rounding, to the gradients of weights; what is added to another gradient is one."""

    def __init__(self) -> None:
        self._made: StorageNotes[Site] = StorageNotes()

    def see(self, call: Call, site: Site) -> None:
        """Take in one op of backward. Syncs: no."""
        known = self._made.first(call.originals)
        if _is_over_one(call):
            self._made.note(call.out[0], known or site)
            for tensor in call.out[1:]:  # its own weight and bias have gradients
                self._made.forget(tensor)
        elif known is None or (call.facts.name in _SUMS and len(self._made.read_by(call)) < len(call.inputs)):
            forget_results(call, self._made)
        else:
            for tensor in call.out:
                self._made.note(tensor, known)

    def behind(self, gradient: Tensor) -> Site | None:
        """Return the op over one number that a gradient came through, if one it did. Syncs: no."""
        return self._made.get(gradient)


def _is_over_one(call: Call) -> bool:
    name, given = call.facts.name, call.named
    if not call.out:
        return False
    if name == "layer_norm_backward":
        shape = given["shape"] if "shape" in given else given["normalized_shape"]  # mezzo's own op, and torch's
        return bool(math.prod(shape) == 1)
    if name == "group_norm_backward":
        return bool(given["C"] // given["group"] * given["HxW"] == 1)
    output = given.get("output") if name in _SOFTMAX else None
    return isinstance(output, Tensor) and output.dim() > 0 and output.shape[given["dim"]] == 1
