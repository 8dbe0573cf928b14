"""`keep_memory`: have the C library keep what a step frees, for the next step to take."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from .kernels.backends.cpp.build import NativeBuildError, library

_log = logging.getLogger(__name__)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of mallopt, from malloc.h
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
_UNDO = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
"""glibc's default count of maps, and the largest thresholds its own adjustment reaches, which mallopt ends for good."""
_SOURCE = Path(__file__).with_suffix(".cpp")
_GAPS = "memory is kept with gaps between tensors, so the peak is higher: %s"
_OTHERS = {
    "mallctl": "jemalloc",
    "tc_version": "tcmalloc",
    "MallocExtension_GetStats": "tcmalloc",
    "mi_version": "mimalloc",
}


class KeptMemory:
    """What `keep_memory` changed; also a context that undoes it.

    Args:
        glibc: the C library, whose allocator keeps memory now; None if nothing was changed.
        why_not: why nothing was changed; empty if something was.

    Attributes:
        in_force: how many calls keep the memory of this process now.
    """

    in_force: ClassVar[int] = 0

    def __init__(self, glibc: ctypes.CDLL | None, why_not: str = "") -> None:
        self._glibc, self.why_not = glibc, why_not
        KeptMemory.in_force += glibc is not None

    @property
    def is_kept(self) -> bool:
        """Whether freed memory is kept from now on by this call."""
        return self._glibc is not None

    def undo(self) -> None:
        """Give back what lies free, and let torch and the C library take and return memory as before, unless another call keeps it. Writes: settings of the process."""
        glibc, self._glibc = self._glibc, None
        if glibc is None:
            return
        KeptMemory.in_force -= 1
        if not KeptMemory.in_force:
            _set(glibc, _UNDO)
            if (blocks := _blocks()) is not None:
                blocks.mezzo_allocator_fit(0)
            glibc.malloc_trim(0)

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"KeptMemory({'kept until undo()' if self.is_kept else f'unchanged: {self.why_not}'})"


def keep_memory() -> KeptMemory:
    """Have glibc keep memory that is freed, so that the next step finds it mapped and warm, and torch take blocks that fit there again.

    By itself glibc maps each block of 32 MiB and more anew, and the kernel clears its pages again: every step pays for
    its activations and gradients. And the aligned blocks that torch asks for leave scraps on which small objects settle, so that the next block of
    that size does not fit between them: code compiled on first use (`allocator.cpp`) gives torch its CPU tensors without. The price is that the process never gets smaller until the last
    `undo`; it matters where others need the memory meanwhile. GPU memory has an allocator of its own and is not concerned.

    Returns:
        What was changed, which can be undone; or why nothing was: another C library, another allocator put before it
        (jemalloc, tcmalloc, mimalloc), or settings that the environment has made already.

    Writes: settings of the C library and torch's CPU allocator, for the whole process. Syncs: no.

    >>> with keep_memory() as kept:
    ...     assert kept.is_kept or kept.why_not
    """
    why_not = _why_not()
    if why_not:
        return KeptMemory(None, why_not)
    glibc, blocks = ctypes.CDLL(None), _blocks()
    if not _set(glibc, _KEEP):
        _set(glibc, _UNDO)
        return KeptMemory(None, "glibc refused the settings")
    if blocks is not None and not blocks.mezzo_allocator_fit(1):
        _log.warning(_GAPS, "another library gave torch its allocator")
    return KeptMemory(glibc)


@cache
def _blocks() -> ctypes.CDLL | None:
    """Return what gives torch blocks that fit again (`allocator.cpp`), compiled once; None, with a warning, where it cannot be."""
    if "THP_MEM_ALLOC_ENABLE" in os.environ:  # torch's own setting, which its own blocks alone follow
        return None
    home = Path(torch.__file__).parent
    names = {"_GLIBCXX_USE_CXX11_ABI": int(torch.compiled_with_cxx11_abi()), "MEZZO_TORCH": torch.version.git_version}
    options = [f"-D{name}={value}" for name, value in names.items()]
    try:
        return library(_SOURCE, "-std=c++20", *options, f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10")
    except NativeBuildError as error:
        _log.warning(_GAPS, f"{error}. {error.remedy}")
        return None


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
    loaded = ctypes.CDLL(None)
    other = next((name for symbol, name in _OTHERS.items() if hasattr(loaded, symbol)), None)
    if other is not None:
        return f"{other} is loaded in place of glibc's allocator, and decides for itself what it keeps"
    if not hasattr(loaded, "gnu_get_libc_version"):
        return "this C library is not glibc, whose allocator this tells to keep memory"
    own = [name for name in os.environ if name.startswith("MALLOC_") and name.endswith("_")]
    own += ["GLIBC_TUNABLES"] if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") else []
    return f"the environment has settings of its own: {', '.join(sorted(own))}" if own else ""


def _set(glibc: ctypes.CDLL, settings: Mapping[int, int]) -> bool:
    return all([glibc.mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings.items()])
