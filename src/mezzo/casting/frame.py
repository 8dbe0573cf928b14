"""Re-entry attached to a checkpoint's own frame, so that plain activation checkpointing recomputes the same dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from traceback import walk_stack
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from .._torch import saved_tensors_hooks


class _InRegion:
    def __init__(self, function: Callable[..., Any], region: AbstractContextManager[Any]) -> None:
        self._function, self._region = function, region

    def __call__(self, *args: Any) -> Any:
        with self._region:
            return self._function(*args)


def bind_recompute(make_region: Callable[..., AbstractContextManager[Any]], *given: Any) -> None:
    """Give the checkpoints that run just now a region, made by `make_region` of what was `given`, so that their recompute enters it.

    Where none runs, or it has one already, nothing happens.

    Writes: a non-reentrant checkpoint's `recompute_fn`; without gradients the `run_function` of reentrant ones. Syncs: no.
    """
    if not torch.is_grad_enabled():
        _bind_reentrant(make_region, given)
    elif (hooks := saved_tensors_hooks()) is not None:
        _bind_frame(hooks[0], make_region, given)


def _bind_frame(pack: Any, make_region: Callable[..., AbstractContextManager[Any]], given: tuple[Any, ...]) -> None:
    """Bind the non-reentrant checkpoint that records: its saved-tensor hook closes over a frame with the function to run again."""
    closure = getattr(pack, "__closure__", None)
    if closure is None or pack.__code__.co_freevars != ("frame",):
        return
    frame = closure[0].cell_contents
    recompute = getattr(frame, "recompute_fn", None)
    if recompute is not None and not isinstance(recompute, _InRegion):
        frame.recompute_fn = _InRegion(recompute, make_region(*given))


def _bind_reentrant(make_region: Callable[..., AbstractContextManager[Any]], given: tuple[Any, ...]) -> None:
    """Bind the reentrant checkpoints on the stack: each runs its function without gradients, and keeps it to run again."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code is CheckpointFunction.forward.__code__:
            context = frame.f_locals["ctx"]
            if not isinstance(context.run_function, _InRegion):
                context.run_function = _InRegion(context.run_function, make_region(*given))
