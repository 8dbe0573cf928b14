"""Triton's interpreter, quicker: it looks through every name of its language at each call of a function, for the same ones each time."""

from __future__ import annotations

import functools
import inspect
from typing import Any


@functools.cache
def quicken() -> None:
    """Have the interpreter look through a module or class once; what it replaces there, and when, stays its own affair."""
    from triton.runtime import interpreter

    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def names_in(space: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(space) if is_builtin(member)]

    def patch(space: Any, *how: Any) -> None:
        for name in names_in(space):
            if is_builtin(member := getattr(space, name)):
                interpreter._patch_attr(space, name, member, *how)

    interpreter._patch_builtin = patch
