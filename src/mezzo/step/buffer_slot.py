"""A place for a buffer in a module, and what it held before a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._torch import buffers_at, own_buffers
from ..stamp import Stamp
from .undo import choose_, copies_of, is_plain


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A buffer as it was: its stamp, None for a buffer of None, what it held, and whether the module had such a buffer."""

    stamp: Stamp | None
    value: Tensor | None
    is_registered: bool = True

    def is_of(self, buffer: Tensor | None) -> bool:
        """Whether a buffer is the tensor that was copied, as it was. Host only."""
        return self.is_registered and _is_current(self.stamp, buffer)

    def is_finite(self) -> bool:
        """Whether there was a value of numbers that can be looked at, and no inf or NaN in it. Syncs: yes."""
        return self.value is not None and is_plain(self.value) and bool(self.value.isfinite().all())


ABSENT = Copy(None, None, is_registered=False)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a buffer in a module.

    Attributes:
        key: its name in the `module` that owns it; `name` is that in the model.
        is_statistic: written without a new version: by batch norm's kernel, or by a forward through `.data`.
        copy: the newest copy.
        is_stale: a statistic that may have been written since.
        dtype: that it had at first, or that a forward gave it.
        left: the stamp of the buffer as the step last left it; None of none.
    """

    name: str
    module: nn.Module
    key: str
    is_statistic: bool
    copy: Copy = ABSENT
    is_stale: bool = False
    dtype: torch.dtype | None = None
    left: Stamp | None = None

    @property
    def buffer(self) -> Tensor | None:
        """The tensor that is there now. Host only."""
        return own_buffers(self.module).get(self.key)

    def leave(self, assigned: bool = False) -> None:
        """Take note of the buffer as it is now; another tensor there is `assigned` if a forward put it there. Host only."""
        buffer = self.buffer
        is_another = buffer is not None and (self.left is None or not self.left.is_of(buffer))
        if buffer is not None and (self.dtype is None or (assigned and is_another)):
            self.dtype = buffer.dtype
        self.left = stamp_of(buffer)

    def is_foreign(self) -> bool:
        """Whether somebody wrote or replaced the buffer since the step left it. Host only."""
        return not _is_current(self.left, self.buffer)

    def is_moved(self, before: Copy) -> bool:
        """Whether the buffer is not, or may not be, what it was in a copy. Host only."""
        return self.is_stale or (self.is_statistic and before is not self.copy) or not before.is_of(self.buffer)

    def restore(self, before: Copy, void: Tensor | bool) -> None:
        """Give the buffer back what it was, where `void` is true. Writes: the buffer, or the module's. Syncs: only if shape or dtype are others now."""
        buffer, value = self.buffer, before.value
        if isinstance(void, Tensor) and buffer is not None and value is not None and is_alike(value, buffer):
            own_buffers(self.module)[self.key] = torch.where(void.to(buffer.device), value, buffer.detach())
        elif bool(void):
            if before.is_registered:
                own_buffers(self.module)[self.key] = None if value is None else value.clone()
            else:
                delattr(self.module, self.key)


def restore_(slots: Sequence[tuple[Slot, Copy]], void: Tensor | bool) -> None:
    """Give buffers back what they were, where `void` is true: those of a dtype and device that stayed in place at once.

    Writes: the buffers. Syncs: only if shape or dtype of one are others now.
    """
    if isinstance(void, Tensor):
        void = void != 0
    if void is False:
        return
    in_place: list[tuple[Tensor, Tensor]] = []
    for slot, before in slots:
        buffer, value = slot.buffer, before.value
        is_in_place = buffer is not None and before.stamp is not None and before.stamp.is_of(buffer)
        if buffer is not None and value is not None and is_in_place and is_alike(value, buffer):
            in_place.append((value, buffer))
        else:
            slot.restore(before, void)
    choose_(in_place, void)


def take_copies(slots: Sequence[Slot]) -> None:
    """Copy the buffers of slots, which were just left. Writes: the slots. Syncs: no."""
    buffers = buffers_at([(slot.module, slot.key) for slot in slots])
    values = iter(copies_of([buffer for buffer in buffers if buffer is not None]))
    for slot, buffer in zip(slots, buffers, strict=True):
        slot.copy, slot.is_stale = Copy(slot.left, None if buffer is None else next(values)), False


def is_alike(value: Tensor | None, buffer: Tensor | None) -> bool:
    """Whether two tensors can be copied into each other: plain ones of one shape, dtype and device. Host only."""
    if value is None or buffer is None or value.dtype is not buffer.dtype or value.device != buffer.device:
        return False
    return is_plain(buffer) and value.layout is buffer.layout and not value.is_nested and value.shape == buffer.shape


def stamp_of(buffer: Tensor | None) -> Stamp | None:
    """Return the stamp of a buffer; None of none. Host only."""
    return None if buffer is None else Stamp.of(buffer)


def _is_current(stamp: Stamp | None, buffer: Tensor | None) -> bool:
    return stamp is None if buffer is None else stamp is not None and stamp.is_current(buffer)
