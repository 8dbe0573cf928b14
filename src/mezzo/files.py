"""Files that are whole or not there: a kill or a full disk in the middle of a write leaves what was there before; and a log that is best effort."""

from __future__ import annotations

import errno
import io
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TextIO

from .errors import ConfigError, MezzoError, kind_of, shown

LONGEST_NAME = 255
"""Bytes that a part of a path may have on the file systems in use."""
_WRITE_BYTES = 2**24
"""Of one write of an image, which a kill waits for."""


def as_path(call: str, name: str, given: object, raising: type[MezzoError] = ConfigError) -> Path:
    """Return the path that a call was given for an argument of some name. Host only.

    Raises:
        ConfigError: or `raising`: it is no path, or no file can be called so.
    """
    if not isinstance(given, str | os.PathLike):
        raise raising(f"{call} was given {kind_of(given)} for {name}; give a path.")
    path = Path(given)
    if why := "it is empty" if not os.fspath(given) else _why_no_name(path):
        raise raising(f"{call} was given {shown(os.fspath(given))} for {name}, which no file can be called: {why}.")
    return path


def _why_no_name(path: Path) -> str:
    try:
        longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    except UnicodeEncodeError:
        return "it holds half of a character"
    if "\0" in str(path):
        return "it holds a NUL character"
    is_long = longest > LONGEST_NAME
    return f"a part of it has {longest} bytes, and no name has more than {LONGEST_NAME}" if is_long else ""


def check_writable(option: str, path: Path) -> None:
    """Refuse with a `ConfigError` a file, or a folder for files, that cannot be written, before what takes long begins. Host only."""
    real = Path(os.path.realpath(path))
    shut = real if real.exists() else real.parent
    is_open = os.access(shut, os.W_OK)
    if is_open and (shut.is_dir() or shut.is_file()):  # who may write is not told where nobody can
        try:
            with TemporaryFile(dir=shut if shut.is_dir() else shut.parent):
                pass
        except OSError:
            is_open = False
    if not is_open:
        raise ConfigError(
            f"{option} {path}: {shut} cannot be written. Name a {'folder' if path.is_dir() else 'file'} that can be."
        )


def flush_to_disk(path: Path) -> None:
    """Bring what was written to a file, or the names in a folder, to the disk. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_into_place(partial: Path, path: Path) -> None:
    """Give what was written, a file or a folder, its name in one move. Raises: OSError."""
    flush_to_disk(partial)
    os.replace(partial, path)
    flush_to_disk(path.parent)


@contextmanager
def replacing(path: Path, *, several: bool = False) -> Iterator[Path]:
    """Return the path of a file to write inside the block; when the block ends it takes the place of another in one move.

    Args:
        path: the file to replace, or to make.
        several: other processes may write it at the same time. Each then writes a file of its own beside it, which
            stays if the process is killed; otherwise the next write takes the place of what was left.

    Raises:
        OSError: it could not be written; the file is what it was.

    Writes: the file; meanwhile one beside it that ends in ".partial".
    """
    end = f"{f'.{secrets.token_hex(8)}' if several else ''}.partial"
    partial = path.with_name(os.fsdecode(os.fsencode(path.name)[: LONGEST_NAME - len(end)]) + end)
    try:
        yield partial
        move_into_place(partial, path)
    except BaseException as error:
        if isinstance(error, OSError) and str(error.filename) == str(partial):  # a name that nobody gave
            error.filename = str(path)
        if not partial.is_dir():
            partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, write: Callable[[BinaryIO], object], *, several: bool = False) -> None:
    """Write a file, whole or not at all: `write` writes its content; all else is as in `replacing`."""
    with replacing(path, several=several) as partial, open(partial, "wb") as file:
        write(file)


def write_text(path: Path, text: str, *, several: bool = False) -> None:
    """Write a file of UTF-8, whole or not at all; what is there and no file, such as /dev/stdout, takes it as it comes. An OSError names the file; all else is as in `replacing`."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_atomically(Path(os.path.realpath(path)), lambda file: file.write(text.encode()), several=several)
    except OSError as error:  # that of a full disk names none
        error.filename = error.filename or str(path)
        raise


class BestEffort:
    """A text stream that drops what it cannot take: no run ends because its log is on a full disk, or its terminal is gone, or somebody closed it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what the stream takes. Returns: the length of the text."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what the stream takes."""
        with suppress(OSError, ValueError):
            self._stream.flush()


class FileImage(io.RawIOBase):
    """A file in memory, which is kept when another is written over it, and which a thread may bring to the disk."""

    def __init__(self) -> None:
        self._memory, self._size = mmap.mmap(-1, mmap.PAGESIZE), 0

    def clear(self) -> None:
        """Make it empty; its memory stays."""
        self._size = 0

    def write(self, data: Any) -> int:
        """Append bytes. Raises: OSError: there is no memory for them."""
        begin, given = self._size, memoryview(data)
        self._size += given.nbytes
        if self._size > len(self._memory):
            whole, old = max(self._size, len(self._memory) * 3 // 2), self._memory
            self._memory = mmap.mmap(-1, -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._memory[:begin] = memoryview(old)[:begin]
        self._memory[begin : self._size] = given
        return given.nbytes

    def contents(self) -> memoryview:
        """Return what was written, in the memory it lies in."""
        return memoryview(self._memory)[: self._size]

    def save(self, path: Path) -> None:
        """Write a file over what is there, and bring it to the disk; past the page cache where that is possible. Raises: OSError."""
        try:
            self._save(path, getattr(os, "O_DIRECT", 0))
        except OSError as refused:
            if refused.errno != errno.EINVAL:
                raise
            self._save(path, 0)  # a file system that knows no direct writes

    def _save(self, path: Path, how: int) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o666)
        try:
            written, pages = 0, memoryview(self._memory)[: -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE]
            while written < len(pages):
                written += os.pwrite(file, pages[written : written + _WRITE_BYTES], written)
            os.ftruncate(file, self._size)
            os.fsync(file)
        finally:
            os.close(file)
