"""Norms and softmaxes over one number, whose result is the same whatever they are given: no gradient passes them but rounding."""

from __future__ import annotations

import math

from torch import Tensor

from .ops import Call
from .records import Site
from .wide_values import StorageNotes, forget_results

_SOFTMAX = ("softmax_backward", "log_softmax_backward_data")


class ConstantOps:
    """Follows what such an op hands back, 0 or rounding, to the gradients of weights; what is added to another gradient is one."""

    def __init__(self) -> None:
        self._made: StorageNotes[Site] = StorageNotes()

    def see(self, call: Call, site: Site) -> None:
        """Take in one op of backward. Syncs: no."""
        found = [self._made.get(call.original(t)) for _, t in call.inputs]
        known = next((s for s in found if s is not None), None)
        if _is_over_one(call):
            self._made.note(call.out[0], known or site)
            for tensor in call.out[1:]:  # its own weight and bias have gradients
                self._made.forget(tensor)
        elif known is None or (call.facts.name in ("add", "cat", "stack") and None in found):
            forget_results(call, self._made)
        else:
            for tensor in call.out:
                self._made.note(tensor, known)

    def behind(self, gradient: Tensor) -> Site | None:
        """Return the op over one number that a gradient came through, if one it did. Syncs: no."""
        return self._made.get(gradient)


def _is_over_one(call: Call) -> bool:
    name, given = call.facts.name, dict(zip(call.facts.arguments, call.args, strict=False))
    if not call.out:
        return False
    if name == "layer_norm_backward":
        shape = given["shape"] if "shape" in given else given["normalized_shape"]  # mezzo's own op, and torch's
        return bool(math.prod(shape) == 1)
    if name == "group_norm_backward":
        return bool(given["C"] // given["group"] * given["HxW"] == 1)
    output = given.get("output") if name in _SOFTMAX else None
    return isinstance(output, Tensor) and output.dim() > 0 and output.shape[given["dim"]] == 1
