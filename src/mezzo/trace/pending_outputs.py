"""Non-finite outputs that lead to a gradient: a loss will judge them, or nobody ever does."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from .._torch import node_number
from .records import Sink


class _Alive:
    """Lies with an autograd node, and dies with it."""


class PendingOutputs:
    """Non-finite outputs of outermost modules, until a backward passes through them or they are dropped."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, weakref.ref[_Alive], Sink]] = []

    def add(self, output: Tensor, sink: Sink) -> None:
        """Wait for what becomes of an output. Writes: the metadata of its autograd node."""
        node = output.grad_fn
        if node is None:
            return
        alive = _Alive()
        metadata: Any = node.metadata
        metadata[_Alive] = alive
        self._pending.append((node_number(node), weakref.ref(alive), sink))

    def differentiated(self, loss: Tensor) -> None:
        """Drop the outputs that a loss was computed from: they are judged there."""
        if self._pending:
            known = _nodes_behind(loss, min(number for number, _, _ in self._pending))
            self._pending = [p for p in self._pending if p[0] not in known]

    def clear(self) -> None:
        """Drop all of them."""
        self._pending.clear()

    def dropped(self, *, is_over: bool = False) -> list[Sink]:
        """Return those that nothing was computed from and that are gone, or all at the end of a program."""
        found = [p for p in self._pending if is_over or p[1]() is None]
        self._pending = [p for p in self._pending if p not in found]
        return [sink for _, _, sink in found]


def leaves_behind(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward from `loss` will bring, those of no module among them."""
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    found: list[Tensor] = []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            found.append(variable)
        todo += [following for following, _ in node.next_functions]
    return found


def _nodes_behind(loss: Tensor, first: int) -> set[int]:
    """Return the numbers of the autograd nodes that lead to a loss, of those made since the one numbered `first`."""
    seen: set[int] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node_number(node) in seen or node_number(node) < first:
            continue
        seen.add(node_number(node))
        todo += [following for following, _ in node.next_functions]
    return seen
