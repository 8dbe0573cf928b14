"""Re-entry attached to a checkpoint's own frame, so that plain activation checkpointing recomputes the same dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

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


def bind_reentrant(current: Callable[[], AbstractContextManager[Any]]) -> None:
    """Give the reentrant checkpoints whose functions run just now a region, so that their recompute enters it.

    Such a checkpoint runs its function without gradients and keeps it to run again in backward.

    Args:
        current: makes the region to enter.

    Writes: the checkpoints' `run_function`. Syncs: no.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            context = frame.f_locals["ctx"]
            if not isinstance(context.run_function, _InRegion):
                context.run_function = _InRegion(context.run_function, current())
        frame = frame.f_back
