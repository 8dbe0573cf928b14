"""Compiled kernels on disk: loaded only if this user owns them, nobody else can write them, and they are whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ....files import write_atomically
from .targets import is_sealed, sealed

_log = logging.getLogger("mezzo.kernels")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def candidates() -> list[Path]:
    """Return where compiled kernels may be kept, best first: the user's cache, then a folder among temporary files."""
    folders = []
    with contextlib.suppress(RuntimeError):  # neither HOME nor a known user
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
    folders = [folder / "mezzo" for folder in folders if folder.is_absolute()]
    with contextlib.suppress(OSError):  # no folder for temporary files
        folders.append(Path(tempfile.gettempdir()) / f"mezzo-{_user()}")
    return folders


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


@functools.cache
def fresh() -> Path:
    """Return a folder of this process alone, removed when it ends. Raises: OSError."""
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="mezzo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def objection(status: os.stat_result) -> str:
    """Say why a file or folder may hold what somebody else wrote; empty if it cannot."""
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid != _user():
        return f"user {status.st_uid} owns it, and this process runs as {_user()}"
    return "others may write to it" if status.st_mode & _OTHERS_WRITE else ""


@contextlib.contextmanager
def opened(folder: Path, *, make: bool) -> Iterator[int]:
    """Open a folder that only this user can write; everything after goes by its descriptor, whatever its name becomes.

    One that cannot be opened or made, or that somebody else may write to, is an OSError.
    """
    if make:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if reason := objection(os.fstat(descriptor)):
            _warn_of(folder, reason)
            raise PermissionError(errno.EPERM, reason, str(folder))
        yield descriptor
    finally:
        os.close(descriptor)


@functools.cache
def _warn_of(path: Path, reason: str) -> None:
    _log.warning(
        "%s is not used for compiled kernels: %s, so what lies there could be anybody's code. "
        "Write chmod go-w, or set XDG_CACHE_HOME to a folder of your own.", path, reason
    )  # fmt: skip


def load(folder: Path, name: str) -> ctypes.CDLL | None:
    """Return the library of a name in a folder; None if it is not there, not ours, not whole, or does not load."""
    try:
        with opened(folder, make=False) as descriptor:
            is_whole = _is_whole(folder, name, descriptor)
            return ctypes.CDLL(str(_by_descriptor(folder, descriptor) / name)) if is_whole else None
    except OSError as error:
        _log.debug("%s/%s is not loaded: %s", folder, name, error)
        return None


def _is_whole(folder: Path, name: str, descriptor: int) -> bool:
    handle = os.open(name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0), dir_fd=descriptor)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if reason := objection(status):
            _warn_of(folder / name, reason)
            return False
        return stat.S_ISREG(status.st_mode) and is_sealed(file.read())


def _by_descriptor(folder: Path, descriptor: int) -> Path:
    """Return a path that leads to an open folder whatever its name has become, where the system has one."""
    path = Path(f"/proc/self/fd/{descriptor}")
    return path if path.exists() else folder


def store(folder: Path, name: str, code: bytes) -> None:
    """Write a library with its digest; whole or not at all, whoever else writes it at the same time. Raises: OSError."""
    with opened(folder, make=True) as descriptor:

        def write(file: BinaryIO) -> None:
            os.chmod(file.name, 0o600)
            file.write(sealed(code))

        write_atomically(_by_descriptor(folder, descriptor) / name, write, several=True)
