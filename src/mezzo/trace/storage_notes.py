"""What is known about the memory of live tensors, forgotten when the memory is freed."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch import storage_id

T = TypeVar("T")


def _is_gone(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())  # type: ignore[no-untyped-call]  # torch's own


class StorageNotes(Generic[T]):
    """A note per storage, so that views and in-place writes share it.

    A weak reference to each storage is held: its address is not given to another tensor while the note stands.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[StorageWeakRef, T]] = {}
        self._limit = 256

    def __len__(self) -> int:
        return len(self._notes)

    def get(self, tensor: Tensor) -> T | None:
        """Return the note on a tensor's memory."""
        found = self._notes.get(storage_id(tensor)) if self._notes else None
        return None if found is None or _is_gone(found[0]) else found[1]

    def note(self, tensor: Tensor, value: T) -> None:
        """Write a note on a tensor's memory over any older one."""
        ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own
        self._notes[ref.cdata] = (ref, value)
        if len(self._notes) > self._limit:
            self._notes = {k: v for k, v in self._notes.items() if not _is_gone(v[0])}
            self._limit = max(256, 2 * len(self._notes))

    def forget(self, tensor: Tensor) -> None:
        """Drop the note on a tensor's memory."""
        if self._notes:
            self._notes.pop(storage_id(tensor), None)

    def live(self) -> list[T]:
        """Return the notes on memory that is still in use."""
        return [value for ref, value in self._notes.values() if not _is_gone(ref)]
