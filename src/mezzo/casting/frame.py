"""Re-entry attached to a checkpoint's own frame, so that plain activation checkpointing recomputes the same dtypes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .._torch import saved_tensors_hooks


class _InRegion:
    def __init__(self, function: Callable[..., Any], region: AbstractContextManager[Any]) -> None:
        self._function = function
        self._region = region

    def __call__(self, *args: Any) -> Any:
        with self._region:
            return self._function(*args)


def bind_frame(current: Callable[[], AbstractContextManager[Any]]) -> None:
    """Give the checkpoint frame that is recording now a region, so that its recompute enters it.

    torch's non-reentrant checkpoint records through saved-tensor hooks that close over a frame holding the function
    to recompute. Where no such frame is recording, or it is bound already, nothing happens.

    Args:
        current: makes the region to enter.

    Writes: the frame's `recompute_fn`.
    Syncs: no.
    """
    hooks = saved_tensors_hooks()
    if hooks is None:
        return
    closure = getattr(hooks[0], "__closure__", None)
    if closure is None or hooks[0].__code__.co_freevars != ("frame",):
        return
    frame = closure[0].cell_contents
    recompute = getattr(frame, "recompute_fn", None)
    if recompute is not None and not isinstance(recompute, _InRegion):
        frame.recompute_fn = _InRegion(recompute, current())
