"""What a tensor was at one moment, so that it can be asked later whether it still is that. Host only."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from ._torch import storage_id, version


class Stamp(NamedTuple):
    """One tensor at one moment: which object it was, where it lay, and how often it had been written.

    The tensor is not kept alive, so another one may get its `id`, but not its stamp.

    Attributes:
        tensor: a weak reference to it.
        version: of its values; every write in place raises it. -1 for a tensor that keeps no count.
        storage: of its memory, as `_torch.storage_id` has it; None where nobody asked for it.
    """

    tensor: weakref.ref[Tensor]
    version: int
    storage: int | None = None

    @classmethod
    def of(cls, tensor: Tensor, *, with_storage: bool = False) -> Stamp:
        """Return the stamp of a tensor as it is now; with that of its memory, which `tensor.data = ...` swaps without a new version. Syncs: no."""
        return cls(weakref.ref(tensor), version_of(tensor), storage_id(tensor) if with_storage else None)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the stamp of that tensor, written since or not. Host only."""
        return self.tensor() is tensor

    def is_current(self, tensor: Tensor) -> bool:
        """Whether that tensor is still what it was: the same object in the same memory, and not written since. Host only."""
        return (
            self.tensor() is tensor
            and self.version == version_of(tensor)
            and (self.storage is None or self.storage == storage_id(tensor))
        )


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version counter; -1 for a tensor that keeps no count. Host only."""
    try:
        return version(tensor)
    except RuntimeError:  # made in inference mode
        return -1


def versions_of(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """Return the version counters of many tensors, None of none; no Python call for each. Host only."""
    try:
        return [None if tensor is None else version(tensor) for tensor in tensors]
    except RuntimeError:
        return [None if tensor is None else version_of(tensor) for tensor in tensors]
