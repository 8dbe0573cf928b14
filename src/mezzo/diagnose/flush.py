"""Results that a 16-bit format flushed to zero, remembered until somebody divides by them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..formats import LOW_DTYPES, dtype_name, format_of
from .call import Call
from .ledger import Ledger
from .measure import numbers, rerun_wide
from .records import Flush, Site

_CAN_FLUSH = frozenset({
    "add", "sub", "mul", "div", "pow", "exp", "expm1", "square", "to", "mean", "softmax", "sigmoid", "clamp",
    "clamp_min", "reciprocal", "rsqrt", "var", "var_mean", "addcmul", "addcdiv", "linalg_vector_norm", "sum",
})  # fmt: skip


def vanishing_constant(call: Call, dtype: torch.dtype) -> float | None:
    """Return the first number among an op's arguments that is not 0 and rounds to 0 in a format."""
    half = format_of(dtype).smallest / 2
    return next((x for x in numbers(call.args, call.kwargs) if 0 < abs(x) <= half), None)


class FlushWatch:
    """Notes which live tensors hold zeros that fp32 would not have given."""

    def __init__(self) -> None:
        self._flushes: Ledger[Flush] = Ledger()

    def see(self, call: Call, site: Site) -> None:
        """Take in one op. Backward ops are left out: gradients that vanish divide nothing. Syncs: yes."""
        if site.phase == "backward":
            return
        inherited = self.behind(t for _, t in call.inputs)
        candidates = [t for t in call.out if t.dtype in LOW_DTYPES and call.facts.name in _CAN_FLUSH]
        if not candidates and inherited is None:
            for tensor in call.out if not call.facts.writes else ():
                self._flushes.forget(tensor)
            return
        for i, tensor in enumerate(call.out):
            found = self._flush(call, site, i, tensor) if tensor.dtype in LOW_DTYPES and candidates else None
            found = found or (inherited if bool((tensor == 0).any()) else None)
            if found is not None:
                self._flushes.note(tensor, found)
            elif not call.facts.writes:
                self._flushes.forget(tensor)

    def behind(self, tensors: Iterable[Tensor]) -> Flush | None:
        """Return the flush that one of these tensors came through."""
        return next((f for f in (self._flushes.get(t) for t in tensors) if f is not None), None)

    @staticmethod
    def _flush(call: Call, site: Site, index: int, tensor: Tensor) -> Flush | None:
        zeros = tensor == 0
        if not bool(zeros.any()):
            return None
        wide = rerun_wide(call.func, call.facts, call.args, call.kwargs, torch.float32)
        if wide is None or len(wide) <= index or wide[index].shape != tensor.shape:
            return None
        lost = zeros & (wide[index] != 0)
        if not bool(lost.any()):
            return None
        return Flush(
            site=site,
            kernel=call.facts.kernel,
            dtype=dtype_name(tensor.dtype),
            share=float(lost.double().mean()),
            wide_amax=float(wide[index][lost].abs().amax()),
            constant=vanishing_constant(call, tensor.dtype),
        )
