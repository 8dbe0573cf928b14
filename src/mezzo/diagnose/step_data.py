"""What a step was made of, as a file: a pickle of plain data and of the bytes of tensors, which is read without running code.

torch.save takes half a millisecond where a training step has emptied the caches since the last call, five times this. At its
end stands a checksum, so that what a disk or a copy damaged is not taken for what a run computed.
"""

from __future__ import annotations

import io
import mmap
import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import DataError, is_out_of_memory

_MARK = b"crc32"
"""Stands before the checksum; files of earlier records end without both."""


class _Summed:
    """Hands bytes on to a file, and keeps their checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc = file, 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)


class _Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, Tensor):
            return None
        host = value.detach().cpu()
        if type(host) is not Tensor or host.layout is not torch.strided or host.is_quantized or host.is_nested:
            torch.save(host, buffer := io.BytesIO())
            return (buffer.getvalue(),)
        dense = host.resolve_conj().resolve_neg().contiguous()
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        return pickle.PickleBuffer(flat.numpy().data), str(value.dtype).removeprefix("torch."), tuple(value.shape)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a record holds data only")

    def persistent_load(self, found: Any) -> Tensor:
        if len(found) == 1:
            return torch.load(io.BytesIO(found[0]), weights_only=True)  # type: ignore[no-any-return]
        data, dtype, shape = found
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(getattr(torch, dtype)).reshape(shape)


def write(data: Any, file: BinaryIO) -> None:
    """Write nested data with tensors of any device and layout. Raises: OSError. Syncs: for tensors on a device."""
    summed = _Summed(file)
    _Writer(summed, protocol=5).dump(data)
    file.write(seal(summed.crc))


def seal(crc: int) -> bytes:
    """Return what ends a file of a record, given the CRC-32 of all before it. Host only."""
    return _MARK + crc.to_bytes(4, "little")


def _check(file: BinaryIO) -> None:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as held:
        if held[-9:-4] == _MARK and held[-9:] != seal(zlib.crc32(held[:-9])):
            raise ValueError(
                "its checksum is not that of what was written: the file was damaged since. Give another copy of it."
            )


def fits(value: Any, layout: Any) -> bool:
    """Whether data has a layout: a dict its keys (a type stands for any number of such keys), a tuple its items, a list any number of its one item; a type is what a value is of. Host only.

    >>> fits({"a": [1, 2], 3: 1.0}, {"a": [int], int: float}), fits({"a": [1, "x"]}, {"a": [int]})
    (True, False)
    """
    if isinstance(layout, Mapping):
        is_whole = isinstance(value, Mapping) and all(key in value or isinstance(key, type) for key in layout)
        return is_whole and all(fits(v, layout.get(key, layout.get(type(key), object))) for key, v in value.items())
    if isinstance(layout, (list, tuple)):
        wanted = layout * len(value) if isinstance(layout, list) and isinstance(value, (list, tuple)) else layout
        return isinstance(value, (list, tuple)) and len(value) == len(wanted) and all(map(fits, value, wanted))
    return isinstance(value, layout)


def read(path: Path, layout: Any = object, load: Callable[[BinaryIO], Any] = lambda file: _Reader(file).load()) -> Any:
    """Return what `write` wrote, or what `load` makes of another file of a record, laid out as `fits` asks; in memory of its own.

    Raises: DataError: something else, or a damaged file; nothing in it is called.
    """
    try:
        with path.open("rb") as file:
            _check(file)
            if not fits(data := load(file), layout):
                raise ValueError(
                    "it is not laid out as this version writes it. Replay it with the one that recorded it."
                )
            return data
    except Exception as failure:  # whatever a damaged file makes of the unpickler
        if is_out_of_memory(failure):
            raise
        raise DataError(f"{str(path)!r} cannot be read as a record: {failure}") from failure
