"""When a non-finite value counts as arrived: the host reads it, or it leaves the model and nobody differentiates it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import node_number, tree_leaves
from .measure import any_nan, finite, is_finite, numbers, rerun, sanitised
from .ops import FACTORIZATIONS, Call
from .records import Event, Frame, Sink, Site
from .wide_values import StorageNotes

_COMPARES = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isneginf", "isposinf", "isfinite", "isclose", "signbit",
})  # fmt: skip
_ASKS = _COMPARES | FACTORIZATIONS
"""Ops that answer a question about what they are given."""
_COMBINES = _ASKS | {
    "to", "sum", "mean", "all", "any", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "is_any_true", "is_all_true", "mul", "add", "max", "amax", "min", "amin", "count_nonzero", "stack", "cat", "rsub",
}  # fmt: skip

_RANGES = frozenset({"arange", "linspace", "logspace", "range"})
"""Ops that compute from Python's numbers alone."""
_METRICS = frozenset({"div", "mean", "std", "var", "reciprocal", "corrcoef", "floor_divide"})


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


def is_metric(event: Event) -> bool:
    """Say whether a value was computed as statistics are: outside of modules, and of what leads to gradients."""
    return event.site.op in _METRICS and event.site.phase != "backward" and not event.site.root and not event.tracked


def is_arithmetic(call: Call, bad: list[Tensor]) -> bool:
    """Tell computed non-finite values from ones the program wrote on purpose, such as a mask's -inf. Syncs: yes."""
    given = [x for x in numbers(call.args, call.kwargs) if not math.isfinite(x)]
    if not given:
        return bool(call.inputs or call.whole) or call.facts.name in _RANGES
    return any_nan(bad) and not any(math.isnan(x) for x in given)


def matters(call: Call, source: Tensor) -> bool:
    """Say whether repairing one input alone makes an element of the results finite. Syncs: yes."""
    out = rerun(call, call.given_with({id(source): sanitised(source)}))
    was_bad = [~finite(t) for t in call.out]
    return any(bool((finite(o) & b).any()) for o, b in zip(out, was_bad, strict=True))


class HostReads:
    """Follows comparisons of non-finite values to where the host reads their result."""

    def __init__(self, causes: StorageNotes[frozenset[int]]) -> None:
        self._causes = causes
        self._answers: StorageNotes[Read] = StorageNotes()

    def _reads(self, tensors: Iterable[Tensor]) -> list[Read]:
        found = []
        for t in tensors:
            causes = self._causes.get(t) if t.is_floating_point() else None
            if causes and not is_finite(t):
                found.append(Read(causes, t.numel() == 1, t.requires_grad))
        return found

    def see(self, call: Call, out: Any) -> None:
        """Take in one op: an answer to a question about non-finite values is marked. Syncs: yes, where there are any."""
        if not len(self._causes) or call.facts.name not in _COMBINES:
            return
        given = [t for t in tree_leaves(call.given) if _is_strided(t)]
        found = [r for t in given if (r := self._answers.get(t)) is not None]
        if call.facts.name in _ASKS:
            found += self._reads(given)
        for tensor in tree_leaves(out):
            if not _is_strided(tensor) or (call.facts.name in FACTORIZATIONS and tensor.is_floating_point()):
                continue
            if found:
                causes = frozenset().union(*(r.causes for r in found))
                self._answers.note(tensor, Read(causes, all(r.is_scalar for r in found), any(r.tracked for r in found)))
            elif tensor.dtype is torch.bool:
                self._answers.forget(tensor)

    def behind(self, call: Call) -> frozenset[int]:
        """Return the events behind answers that an op was given. Host only."""
        given = [t for t in tree_leaves(call.given) if _is_strided(t)]
        return frozenset().union(*(r.causes for t in given if (r := self._answers.get(t)) is not None))

    def of(self, tensor: Tensor) -> Read | None:
        """Return what the host learns about non-finite values when it reads this tensor. Syncs: yes."""
        if not len(self._causes) or not _is_strided(tensor):
            return None
        return self._answers.get(tensor) or next(iter(self._reads([tensor])), None)


def _is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


class _Alive:
    """Lies with an autograd node, and dies with it."""


class PendingOutputs:
    """Non-finite outputs of outermost modules, until a backward passes through them or they are dropped."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, weakref.ref[_Alive], Sink]] = []

    def add(self, output: Tensor, sink: Sink) -> None:
        """Wait for what becomes of an output. Writes: the metadata of its autograd node. Syncs: no."""
        node = output.grad_fn
        if node is None:
            return
        alive = _Alive()
        metadata: Any = node.metadata
        metadata[_Alive] = alive
        self._pending.append((node_number(node), weakref.ref(alive), sink))

    def differentiated(self, loss: Tensor) -> None:
        """Drop the outputs that a loss was computed from: they are judged there. Syncs: no."""
        if self._pending:
            known = {node_number(node) for node in _nodes_behind(loss, min(number for number, _, _ in self._pending))}
            self._pending = [p for p in self._pending if p[0] not in known]

    def dropped(self, *, is_over: bool = False) -> list[Sink]:
        """Return those that nothing was computed from and that are gone, or all at the end of a program."""
        found = [p for p in self._pending if is_over or p[1]() is None]
        self._pending = [p for p in self._pending if p not in found]
        return [sink for _, _, sink in found]


class Detached:
    """The leaves behind what a program detached, by the line that did so first."""

    def __init__(self) -> None:
        self._lines: dict[Frame | None, set[int]] = {}

    def see(self, tensor: Tensor, site: Site) -> None:
        """Take note of a tensor that is being detached. Host only; once a line."""
        if site.called == "detach" and site.frame not in self._lines and tensor.grad_fn is not None:
            self._lines[site.frame] = {id(leaf) for leaf in leaves_behind(tensor)}

    def line_of(self, leaf: int) -> Frame | None:
        """Return the line that detached what a leaf, given by its id, computed; None if none did. Host only."""
        return next((frame for frame, leaves in self._lines.items() if leaf in leaves), None)


def leaves_behind(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward from `loss` will bring, those of no module among them. Syncs: no."""
    return [v for node in _nodes_behind(loss) if isinstance(v := getattr(node, "variable", None), Tensor)]


def _nodes_behind(loss: Tensor, first: int = 0) -> set[Any]:
    """Return the autograd nodes that lead to a loss, of those made since the one numbered `first`."""
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen and node_number(node) >= first:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return seen


def is_bad_anyway(call: Call) -> bool:
    """Say whether an op goes wrong on the finite part of its inputs too. Syncs: yes."""
    if call.facts.draws or any(not math.isfinite(x) for x in numbers(call.args, call.kwargs)):
        return False
    return not all(is_finite(t) for t in rerun(call, sanitised(call.given)))
