"""Files that are whole or not there: a kill or a full disk in the middle of a write leaves what was there before."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
    partial = path.with_name(f"{path.name}{f'.{secrets.token_hex(8)}' if several else ''}.partial")
    try:
        yield partial
        move_into_place(partial, path)
    except BaseException:
        if not partial.is_dir():
            partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, write: Callable[[BinaryIO], object], *, several: bool = False) -> None:
    """Write a file, whole or not at all.

    Args:
        path: the file.
        write: writes the content.
        several: as in `replacing`.

    Raises:
        OSError: it could not be written; the file is what it was.

    Writes: the file; meanwhile one beside it that ends in ".partial".
    """
    with replacing(path, several=several) as partial, open(partial, "wb") as file:
        write(file)
