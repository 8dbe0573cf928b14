"""One row of the fault zoo: a small program, the fault planted in it, and what the diagnosis must say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

MARK = "# FAULT"
Program = Callable[[torch.dtype], Callable[[], object]]
"""Builds a program for a compute dtype; calling the result runs it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the diagnosis of a sick program must name.

    Attributes:
        build: the program; the faulty line carries the mark.
        op: plain name.
        module: fully qualified name below the outermost module.
        verdict: kind of fault.
        phase: forward, backward or optimizer.
        dtypes: compute dtypes to run it in.
        names: words that the explanation must hold.
    """

    build: Program
    op: str
    verdict: str
    module: str = ""
    phase: str = "forward"
    dtypes: tuple[torch.dtype, ...] = (torch.float16,)
    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def line(self) -> tuple[str, int] | None:
        """File and number of the marked line; None where the program marks none."""
        source, start = inspect.getsourcelines(self.build)
        marked = [start + i for i, text in enumerate(source) if MARK in text]
        assert len(marked) <= 1, f"{self.name}: {len(marked)} marked lines"
        return (inspect.getsourcefile(self.build) or "", marked[0]) if marked else None
