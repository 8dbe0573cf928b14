"""What is known about the memory of live tensors: notes, and values in a wider format beside those it holds."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch import storage_id
from .ops import Call


def flat(tensor: Tensor) -> Tensor:
    """Return the whole storage behind a tensor, as a view. Syncs: no."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def at(values: Tensor, like: Tensor) -> Tensor | None:
    """Return the view of a flat tensor that lies where `like` lies; None if its memory was made larger since. Syncs: no."""
    last = like.storage_offset() + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    if like.numel() and last >= values.numel():
        return None
    return values.as_strided(like.shape, like.stride(), like.storage_offset())


class WideValues:
    """A flat tensor beside each storage that would hold something else in a wider format.

    It has the layout of the storage, so a view of one is the same view of the other. Syncs: no.
    """

    def __init__(self) -> None:
        self.notes: StorageNotes[tuple[int, Tensor]] = StorageNotes()

    def __len__(self) -> int:
        return len(self.notes)

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return the wide values where a tensor lies; None where nothing is known. Syncs: no."""
        found = self.notes.get(tensor)
        return None if found is None or found[0] != tensor.itemsize else at(found[1], tensor)

    def known(self, call: Call) -> dict[int, Tensor]:
        """Return the wide values of an op's inputs, where there are any, by the id of what it read. Syncs: no."""
        found = ((id(t), self.get(call.original(t))) for _, t in call.inputs)
        return {key: wide for key, wide in found if wide is not None}

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Note what a tensor that was just written would hold, all of its storage or a part of it. Syncs: no."""
        if tensor.numel() == 0:
            return
        found = self.notes.get(tensor)
        known = None if found is None or found[0] != tensor.itemsize else found[1]
        if known is None or known.dtype != values.dtype or at(known, tensor) is None:
            known = flat(tensor).to(values.dtype, copy=True)
            self.notes.note(tensor, (tensor.itemsize, known))
        view = at(known, tensor)
        assert view is not None  # made from this storage
        view.copy_(values)

    def forget(self, tensor: Tensor) -> None:
        """Say that a tensor holds what it should. Syncs: no."""
        self.notes.forget(tensor)


T = TypeVar("T")


def forget_results(call: Call, *kept: WideValues | StorageNotes[Any]) -> None:
    """Say that the results of an op hold what they should. Syncs: no."""
    for notes in kept:
        for tensor in call.out:
            notes.forget(tensor)


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
        """Return the note on a tensor's memory. Syncs: no."""
        found = self._notes.get(storage_id(tensor)) if self._notes else None
        return None if found is None or _is_gone(found[0]) else found[1]

    def note(self, tensor: Tensor, value: T) -> None:
        """Write a note on a tensor's memory over any older one. Syncs: no."""
        ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own
        self._notes[ref.cdata] = (ref, value)
        if len(self._notes) > self._limit:
            self._notes = {k: v for k, v in self._notes.items() if not _is_gone(v[0])}
            self._limit = max(256, 2 * len(self._notes))

    def forget(self, tensor: Tensor) -> None:
        """Drop the note on a tensor's memory. Syncs: no."""
        if self._notes:
            self._notes.pop(storage_id(tensor), None)

    def drop_except(self, others: StorageNotes[Any]) -> None:
        """Keep the notes on memory that is still in use and that `others` has none on."""
        self._notes = {k: v for k, v in self._notes.items() if k not in others._notes and not _is_gone(v[0])}

    def live(self) -> list[T]:
        """Return the notes on memory that is still in use."""
        return [value for ref, value in self._notes.values() if not _is_gone(ref)]
