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

import torch

_FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp", "-march=native",
    # no product and sum are joined, and no operation dropped or reordered, except where the source says so
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_HEADERS = Path(__file__).parent
_log = logging.getLogger("mezzo.kernels")


class NativeBuildError(Exception):
    """No compiler, or one that does not compile the kernels; the message is a clause that says which."""


def compiler() -> str:
    """Return the C++ compiler: the one the environment variable CXX names, else g++ or clang++.

    Raises:
        NativeBuildError: there is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeBuildError("no C++ compiler (g++, clang++, or the one that CXX names)")


def torch_fuses() -> bool:
    """Say whether torch on this machine rounds a product and the sum after it once.

    1 + 2^-12 squared is 1 + 2^-11 + 2^-24, and fp32 drops the last term unless the sum with -1 - 2^-11 comes first.
    """
    x = torch.full((64,), 1 + 2.0**-12)
    return bool(torch.addcmul(torch.full((64,), -1 - 2.0**-11), x, x).ne(0).all())


def cache_folder() -> Path:
    """Return the folder that compiled kernels are kept in, made if missing; a fresh one if that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mezzo"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        _log.debug("%s cannot be written", folder)
    return Path(tempfile.mkdtemp(prefix="mezzo-"))


def _machine() -> str:
    """Return what -march=native depends on."""
    cpu = Path("/proc/cpuinfo")
    flags = (
        [line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))]
        if cpu.exists()
        else []
    )
    return "\n".join([platform.machine(), platform.processor(), *flags[:2]])


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """Return a kernel's compiled code, compiling it if this machine has not yet; seconds, then never again.

    Args:
        source: a C++ file; may include the headers beside this module.

    Raises:
        NativeBuildError: no compiler, or it failed; its first complaint is in the message.

    Source: the cache key is everything the result depends on: sources, flags, compiler, processor.
    """
    cxx = compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    flags = [*_FLAGS, f"-DMEZZO_FMA={int(torch_fuses())}", f"-I{_HEADERS}"]
    texts = [path.read_text() for path in (source, *sorted(_HEADERS.glob("*.h")))]
    key = hashlib.sha256("\0".join([cxx, version, _machine(), *flags, *texts]).encode()).hexdigest()[:16]
    built = cache_folder() / f"{source.parent.name}-{key}.so"
    if not built.exists():
        _log.info("compiling %s with %s, once", source.name, cxx)
        # Under another name first: ranks that start together never load half a file.
        handle, partial = tempfile.mkstemp(suffix=".so", dir=built.parent)
        os.close(handle)
        done = subprocess.run([cxx, *flags, str(source), "-o", partial], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            Path(partial).unlink()
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise NativeBuildError(f"{cxx} does not compile it: {complaint.strip()}")
        Path(partial).replace(built)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise NativeBuildError(f"what {cxx} built does not load: {error}") from None
