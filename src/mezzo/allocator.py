"""`keep_memory`: have the C library keep what a step frees, for the next step to take."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import ClassVar

_log = logging.getLogger(__name__)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of mallopt, from malloc.h
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
_UNDO = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
"""glibc's default count of maps, and the largest thresholds its own adjustment reaches, which mallopt ends for good."""
_OTHERS = {
    "mallctl": "jemalloc",
    "tc_version": "tcmalloc",
    "MallocExtension_GetStats": "tcmalloc",
    "mi_version": "mimalloc",
}


class KeptMemory:
    """What `keep_memory` changed; also a context that undoes it.

    Args:
        library: whose allocator keeps memory now; None if nothing was changed.
        why_not: why nothing was changed; empty if something was.

    Attributes:
        in_force: how many calls keep the memory of this process now.
    """

    in_force: ClassVar[int] = 0

    def __init__(self, library: ctypes.CDLL | None, why_not: str = "") -> None:
        self._library, self.why_not = library, why_not
        KeptMemory.in_force += library is not None

    @property
    def is_kept(self) -> bool:
        """Whether freed memory is kept from now on by this call."""
        return self._library is not None

    def undo(self) -> None:
        """Give back what lies free, and let the C library return memory as before. Writes: settings of the process."""
        library, self._library = self._library, None
        if library is not None:
            KeptMemory.in_force -= 1
            _set(library, _UNDO)
            library.malloc_trim(0)

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"KeptMemory({'kept until undo()' if self.is_kept else f'unchanged: {self.why_not}'})"


def keep_memory() -> KeptMemory:
    """Have glibc keep memory that is freed, so that the next step finds it mapped and warm.

    By itself glibc maps each block of 32 MiB and more anew, and the kernel clears its pages again: every step pays for
    its activations and gradients. The price is that the process never gets smaller until `undo`, and that it may grow
    beyond its largest step while blocks of differing sizes settle; it matters where others need the memory meanwhile. GPU memory has an allocator of its own and is not concerned.

    Returns:
        What was changed, which can be undone; or why nothing was: another C library, another allocator put before it
        (jemalloc, tcmalloc, mimalloc), or settings that the environment has made already.

    Writes: settings of the C library, for the whole process. Syncs: no.

    >>> with keep_memory() as kept:
    ...     assert kept.is_kept or kept.why_not
    """
    why_not = _why_not()
    if why_not:
        return KeptMemory(None, why_not)
    library = ctypes.CDLL(None)
    if not _set(library, _KEEP):
        _set(library, _UNDO)
        return KeptMemory(None, "glibc refused the settings")
    return KeptMemory(library)


@cache
def suggest_keep_memory() -> None:
    """Say once in the log of a process that its memory can be kept, where it can be and is not yet. Syncs: no."""
    if not KeptMemory.in_force and not _why_not():
        _log.info(
            "glibc returns the memory of each step and maps it anew; mezzo.keep_memory() keeps it (docs/memory.md)"
        )


def _why_not() -> str:
    if sys.platform != "linux":
        return f"{sys.platform} has no glibc, whose allocator this tells to keep memory"
    library = ctypes.CDLL(None)
    other = next((name for symbol, name in _OTHERS.items() if hasattr(library, symbol)), None)
    if other is not None:
        return f"{other} is loaded in place of glibc's allocator, and decides for itself what it keeps"
    if not hasattr(library, "gnu_get_libc_version"):
        return "this C library is not glibc, whose allocator this tells to keep memory"
    own = [name for name in os.environ if name.startswith("MALLOC_") and name.endswith("_")]
    own += ["GLIBC_TUNABLES"] if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") else []
    return f"the environment has settings of its own: {', '.join(sorted(own))}" if own else ""


def _set(library: ctypes.CDLL, settings: Mapping[int, int]) -> bool:
    return all([library.mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings.items()])
