"""Values in a wider format beside those that memory holds."""

from __future__ import annotations

from torch import Tensor

from .storage_notes import StorageNotes


def flat(tensor: Tensor) -> Tensor:
    """Return the whole storage behind a tensor, as a view."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def at(values: Tensor, like: Tensor) -> Tensor | None:
    """Return the view of a flat tensor that lies where `like` lies; None if its memory was made larger since."""
    last = like.storage_offset() + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    if like.numel() and last >= values.numel():
        return None
    return values.as_strided(like.shape, like.stride(), like.storage_offset())


class WideValues:
    """A flat tensor beside each storage that would hold something else in a wider format.

    It has the layout of the storage, so a view of one is the same view of the other. Syncs: no.
    """

    def __init__(self) -> None:
        self._known: StorageNotes[tuple[int, Tensor]] = StorageNotes()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return the wide values where a tensor lies; None where nothing is known."""
        found = self._known.get(tensor)
        return None if found is None or found[0] != tensor.itemsize else at(found[1], tensor)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Note what a tensor that was just written would hold, all of its storage or a part of it."""
        if tensor.numel() == 0:
            return
        found = self._known.get(tensor)
        known = None if found is None or found[0] != tensor.itemsize else found[1]
        if known is None or known.dtype != values.dtype or at(known, tensor) is None:
            known = flat(tensor).to(values.dtype, copy=True)
            self._known.note(tensor, (tensor.itemsize, known))
        view = at(known, tensor)
        assert view is not None  # made from this storage
        view.copy_(values)

    def forget(self, tensor: Tensor) -> None:
        """Say that a tensor holds what it should."""
        self._known.forget(tensor)
