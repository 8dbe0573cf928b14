"""Functions that torch.compile traces as part of a larger one, or leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame as _frames

Function = TypeVar("Function", bound=Callable[..., Any])

_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def never_compiled_alone(function: Function) -> Function:
    """Keep the compiler from compiling a function, and what it calls, by itself; inside a larger one it is traced.

    Where the model breaks the graph inside a region, torch.compile runs the frame with the region as it is and goes on
    to compile every Python function that is called in it, `__enter__` among them. What such a graph writes into torch's
    state is put back when it ends (torch 2.13), so the region would be left again before the model ran, and the model
    would run in fp32 without a word.

    Writes: a mark on the function's code. Does not import the compiler.

    Returns:
        The function itself.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    return function
