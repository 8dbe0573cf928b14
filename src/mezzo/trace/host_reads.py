"""Non-finite values that the host reads: `.item()`, a comparison, `isfinite`. What is read decides what a script does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_leaves
from .ops import Call
from .storage_notes import StorageNotes

_COMPARES = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isneginf", "isposinf", "isfinite", "isclose", "signbit",
})  # fmt: skip
_COMBINES = _COMPARES | {
    "to", "sum", "mean", "all", "any", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "mul", "add", "max", "amax", "min", "amin", "count_nonzero", "stack", "cat", "rsub",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Read:
    """A question about a non-finite tensor whose answer lies in another one.

    Attributes:
        causes: events behind the non-finite values.
        is_scalar: the tensor that was asked about is one number, as a loss is.
        tracked: it leads to gradients.
    """

    causes: frozenset[int]
    is_scalar: bool
    tracked: bool


class HostReads:
    """Follows comparisons of non-finite values to where the host reads their result."""

    def __init__(self, causes: StorageNotes[frozenset[int]]) -> None:
        self._causes = causes
        self._answers: StorageNotes[Read] = StorageNotes()

    def _reads(self, tensors: Iterable[Tensor]) -> list[Read]:
        found = []
        for t in tensors:
            causes = self._causes.get(t) if t.is_floating_point() else None
            if causes and not bool(t.isfinite().all()):
                found.append(Read(causes, t.numel() == 1, t.requires_grad))
        return found

    def see(self, call: Call, out: Any) -> None:
        """Take in one op: an answer to a question about non-finite values is marked. Syncs: yes, where there are any."""
        if not len(self._causes) or call.facts.name not in _COMBINES:
            return
        given = [t for t in tree_leaves((call.args, call.kwargs)) if _is_strided(t)]
        found = [r for t in given if (r := self._answers.get(t)) is not None]
        if call.facts.name in _COMPARES:
            found += self._reads(t for t in given)
        for tensor in tree_leaves(out):
            if not _is_strided(tensor):
                continue
            if found:
                causes = frozenset().union(*(r.causes for r in found))
                self._answers.note(tensor, Read(causes, all(r.is_scalar for r in found), any(r.tracked for r in found)))
            elif tensor.dtype is torch.bool:
                self._answers.forget(tensor)

    def of(self, tensor: Tensor) -> Read | None:
        """Return what the host learns about non-finite values when it reads this tensor. Syncs: yes."""
        if not len(self._causes) or not _is_strided(tensor):
            return None
        return self._answers.get(tensor) or next(iter(self._reads([tensor])), None)


def _is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
