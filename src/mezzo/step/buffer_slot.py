"""A place for a buffer in a module: what is there, what was there, and how it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._torch import foreach_copy_, own_buffers, version


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A buffer as it was.

    Attributes:
        source: the tensor; None for a buffer of None.
        version: of the tensor then.
        value: what it held.
        is_registered: whether the module had such a buffer.
    """

    source: Tensor | None
    version: int
    value: Tensor | None
    is_registered: bool = True

    def is_of(self, buffer: Tensor | None) -> bool:
        """Whether a buffer is the tensor that was copied, as it was. Host only."""
        return self.is_registered and buffer is self.source and _version(buffer) == self.version

    def is_finite(self) -> bool:
        """Whether there was a value, and no inf or NaN in it. Syncs: yes."""
        return self.value is not None and bool(self.value.isfinite().all())


ABSENT = Copy(None, -1, None, is_registered=False)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a buffer in a module.

    Attributes:
        name: in the model.
        module: that owns it.
        key: its name there.
        is_statistic: written by batch norm's kernel, which does not move the version of what it writes.
        copy: the newest copy.
        is_stale: a statistic that may have been written since.
        dtype: that it had at first, or that a forward gave it.
    """

    name: str
    module: nn.Module
    key: str
    is_statistic: bool
    copy: Copy = ABSENT
    is_stale: bool = False
    dtype: torch.dtype | None = None
    _left: tuple[Tensor | None, int] = (None, -1)

    @property
    def buffer(self) -> Tensor | None:
        """The tensor that is there now."""
        return own_buffers(self.module).get(self.key)

    def leave(self, assigned: bool = False) -> None:
        """Take the buffer as it is for the last that is known of it. Host only.

        Args:
            assigned: if it is another tensor, a forward put it there.
        """
        buffer = self.buffer
        if buffer is not None and (self.dtype is None or (assigned and buffer is not self._left[0])):
            self.dtype = buffer.dtype
        self._left = buffer, _version(buffer)

    def is_foreign(self) -> bool:
        """Whether somebody wrote or replaced the buffer since the step left it. Host only."""
        buffer = self.buffer
        return buffer is not self._left[0] or _version(buffer) != self._left[1]

    def is_moved(self, before: Copy) -> bool:
        """Whether the buffer is not, or may not be, what it was in a copy. Host only."""
        return self.is_stale or (self.is_statistic and before is not self.copy) or not before.is_of(self.buffer)

    def restore(self, before: Copy, void: Tensor | bool) -> None:
        """Give the buffer back what it was, where `void` is true.

        Writes: the buffer, or the module's. Syncs: only if shape or dtype are others now.
        """
        buffer = self.buffer
        if buffer is not None and before.value is not None and is_alike(before.value, buffer):
            where = void.to(buffer.device) if isinstance(void, Tensor) else torch.full((), void, device=buffer.device)
            value = torch.where(where, before.value, buffer.detach())
            if buffer is before.source:
                buffer.copy_(value)
            else:
                own_buffers(self.module)[self.key] = value
        elif bool(void):
            if before.is_registered:
                own_buffers(self.module)[self.key] = None if before.value is None else before.value.clone()
            else:
                delattr(self.module, self.key)


@torch.no_grad()
def take_copies(slots: Sequence[Slot]) -> None:
    """Copy the buffers of slots as they are. Writes: the slots. Syncs: no."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for slot in slots:
        buffer = slot.buffer
        value = None if buffer is None else torch.empty_like(buffer)
        slot.copy, slot.is_stale = Copy(buffer, _version(buffer), value), False
        if buffer is not None and value is not None:
            kinds.setdefault((buffer.dtype, buffer.device), []).append((value, buffer.detach()))
    for pairs in kinds.values():
        foreach_copy_([value for value, _ in pairs], [buffer for _, buffer in pairs])


def is_alike(value: Tensor | None, buffer: Tensor | None) -> bool:
    """Whether two tensors can be copied into each other: one shape, dtype, device and layout."""
    if value is None or buffer is None:
        return False
    kinds = [(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in (value, buffer)]
    return kinds[0] == kinds[1]


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else version(buffer)
