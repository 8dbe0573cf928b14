"""What an overflowed value would have been, carried along until an op makes it finite again."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import tree_map
from ..formats import format_of
from .measure import is_finite, rerun_wide
from .ops import Call
from .wide_values import WideValues


class Fp64Reference:
    """Follows overflowed tensors in fp64, so that an infinity that disappears again can be judged.

    `tanh(inf)` is 1, which is what fp32 gives: no fault. `rsqrt(inf)` is 0, which erases the activation without a
    trace of inf or NaN.
    """

    def __init__(self) -> None:
        self._true = WideValues()

    def start(self, call: Call) -> None:
        """Start to follow the results of an op that overflowed."""
        true = rerun_wide(call.func, call.facts, call.args, call.kwargs, torch.float64)
        if true is not None and all(is_finite(t) for t in true):
            for tensor, value in zip(call.out, true, strict=True):
                self._true.put(tensor, value.double())

    def carry(self, call: Call) -> str:
        """Follow an op whose inputs hold non-finite values.

        Returns:
            Empty, or what a finite result is and should have been, where an infinity was absorbed wrongly.

        Syncs: yes.
        """
        known = {id(t): k for _, t in call.inputs if (k := self._true.get(call.original(t))) is not None}
        if not known:
            return ""
        args, kwargs = tree_map(lambda v: known.get(id(v), v), (call.args, call.kwargs))
        true = rerun_wide(call.func, call.facts, args, kwargs, torch.float64)
        if true is None or len(true) != len(call.out):
            return ""
        wrong = [w for t, v in zip(call.out, true, strict=True) if (w := _difference(t, v))]
        for tensor, value in zip(call.out, true, strict=True):
            if not is_finite(tensor) and value.shape == tensor.shape:
                self._true.put(tensor, value.double())
        return wrong[0] if wrong else ""


def _difference(got: Tensor, true: Tensor) -> str:
    """Describe the first finite element that is more than half of the true value away from it."""
    if got.shape != true.shape:
        return ""
    gap = (got.double() - true.double()).abs()
    wrong = got.isfinite() & true.isfinite() & (gap > true.abs() / 2) & (gap > format_of(got.dtype).smallest)
    if not bool(wrong.any()):
        return ""
    return f"{float(got[wrong][0]):.3g} instead of {float(true[wrong][0]):.3g}"
