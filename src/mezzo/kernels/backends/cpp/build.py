"""Compiling a kernel's source on this machine, once."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from . import kernel_cache
from .targets import FLAGS, HEADERS, OPS, file_name, is_sealed, levels, texts

BUILT = HEADERS / "built"
"""Where a wheel keeps kernels that were compiled with it."""
_REMEDY = "Set CXX to a compiler that works, and XDG_CACHE_HOME to a folder of your own with 10 MB free."
_log = logging.getLogger("mezzo.kernels")


class NativeBuildError(Exception):
    """No compiled kernel: a clause that says why, and a sentence about what fixes it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def compiler() -> str:
    """Return the C++ compiler: the one the environment variable CXX names, else g++ or clang++. Raises: NativeBuildError."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeBuildError(
        "no C++ compiler (g++, clang++, or the one that CXX names)", "Install g++ or clang++, or set CXX."
    )


def torch_fuses() -> bool:
    """Say whether torch on this machine rounds a product and the sum after it once.

    1 + 2^-12 squared is 1 + 2^-11 + 2^-24, and fp32 drops the last term unless the sum with -1 - 2^-11 comes first.
    """
    x, y = (torch.full((64,), value, dtype=torch.float32, device="cpu") for value in (1 + 2.0**-12, -1 - 2.0**-11))
    return bool(torch.addcmul(y, x, x).ne(0).all())


def _machine() -> str:
    """Return what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *flags[:2]])


def _flags() -> list[str]:
    """Return the compiler's flags; MEZZO_CXXFLAGS adds some, as the sanitizer runs do."""
    return [*FLAGS, "-march=native", f"-DMEZZO_FMA={int(torch_fuses())}", *os.environ.get("MEZZO_CXXFLAGS", "").split()]


def library(source: Path, *options: str) -> ctypes.CDLL:
    """Return a source's compiled code, compiling it if this machine has not yet; seconds, then never again.

    The file's name holds everything the result depends on: sources, flags, further options and processor, and the compiler where CXX
    names one. So what was compiled once is found where there is no compiler.

    Raises: NativeBuildError: no source, no compiler, or it failed, or nowhere to keep what it made; with the first complaint.
    """
    try:
        found = _library(source, options)
    except OSError as error:  # in a zip file, or frozen without its data
        why, remedy = f"({error.strerror}: '{error.filename}')", "Install mezzo as files, .cpp and .h among them."
        raise NativeBuildError(f"their source cannot be read {why}", remedy) from error
    if isinstance(found, NativeBuildError):
        raise found
    return found


_TYPES = {
    "P": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "i": ctypes.c_int32,
    "I": ctypes.c_uint32,
    "f": ctypes.c_float,
}


class Kernel:
    """The C functions of an op, mezzo_OP_NAME in its `cpu.cpp`, as attributes; compiled when the first is asked for.

    The types of their arguments are letters of `struct`, that of what they return stands behind a colon: "PPq:i".
    """

    def __init__(self, op: str, **types: str) -> None:
        self._op, self._types = op, types

    def __getattr__(self, name: str) -> Any:
        if name not in self._types:
            raise AttributeError(name)
        takes, _, gives = self._types[name].partition(":")
        found = getattr(library(OPS / self._op / "cpu.cpp"), f"mezzo_{self._op}_{name}")
        found.argtypes, found.restype = [_TYPES[letter] for letter in takes], _TYPES.get(gives)
        setattr(self, name, found)
        return found


@functools.cache
def _library(source: Path, options: tuple[str, ...]) -> ctypes.CDLL | NativeBuildError:
    parts = [os.environ.get("CXX", ""), _machine(), *_flags(), *options, *texts(source)]
    name = f"{source.parent.name}-{hashlib.sha256(os.fsencode(chr(0).join(parts))).hexdigest()[:16]}.so"
    for folder in kernel_cache.candidates():
        if (found := kernel_cache.load(folder, name)) is not None:
            return found
    if not options and (found := _carried(source)) is not None:
        return found
    try:
        cxx = compiler()
    except NativeBuildError as error:
        return error
    _log.info("compiling %s with %s, once", source.name, cxx)
    complaints = []
    for home in (*kernel_cache.candidates(), None):  # None: a folder of this process
        try:
            return _built(
                [cxx, *_flags(), f"-I{HEADERS}", str(source), *options],
                kernel_cache.fresh() if home is None else home,
                name,
            )
        except (OSError, NativeBuildError) as error:
            complaints.append(str(error))
    return NativeBuildError(complaints[0], _REMEDY)


def _carried(source: Path) -> ctypes.CDLL | None:
    """Return the best library for this processor that came with the wheel; None if none fits, or flags were asked for."""
    if os.environ.get("MEZZO_CXXFLAGS") or not BUILT.is_dir() or not torch_fuses():
        return None
    flags = next((line.split() for line in _machine().splitlines() if line.startswith("flags")), [])
    for path in (BUILT / file_name(source, level) for level in levels(flags)):
        if path.is_file() and is_sealed(path.read_bytes()):
            _log.debug("%s came with the package", path)
            return ctypes.CDLL(str(path))
    return None


def _built(command: list[str], folder: Path, name: str) -> ctypes.CDLL:
    with kernel_cache.opened(folder, make=True):
        code = _compiled(command, folder)
    kernel_cache.store(folder, name, code)
    found = kernel_cache.load(folder, name)
    if found is None:
        raise NativeBuildError(f"what {command[0]} built does not load from {folder}", _REMEDY)
    return found


def _compiled(command: list[str], folder: Path) -> bytes:
    """Return the code that a compiler makes; what lies around meanwhile lies in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-", ignore_cleanup_errors=True) as scratch:
        target = Path(scratch) / "kernel.so"
        done = subprocess.run(
            [*command, "-o", str(target)],
            env={**os.environ, "LC_ALL": "C", "TMPDIR": scratch},
            stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace")
            complaint = next((line for line in said.splitlines() if "error" in line), said[:200])
            raise NativeBuildError(f"{command[0]} does not compile it: {complaint.strip()}", _REMEDY)
        return target.read_bytes()
