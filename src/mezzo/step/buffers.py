"""Buffers as a transaction: what the forwards of a skipped step wrote is taken back, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_

import torch
from torch import Tensor, nn

from .._torch import NormBase, active_ddp, buffers_at, functorch_level, own_buffers, tree_leaves
from ..stamp import Stamp, versions_of
from .undo import choose_, copies_of, held_once, is_plain

_FIRST_FORWARDS = 3
"""Forwards after which the values of buffers are compared too, not only their versions."""
_Look = tuple[Sequence[object], Sequence[int | None]]
"""Buffers at one moment, and their versions."""


def _is_same(one: _Look, other: _Look) -> bool:
    return len(one[0]) == len(other[0]) and one[1] == other[1] and all(map(is_, one[0], other[0]))


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
        return self.value is not None and is_plain(self.value) and bool(held_once(self.value).isfinite().all())


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
            slot.is_stale |= slot.is_statistic
            in_place.append((value, buffer.data if slot.is_statistic else buffer))  # graphs of other losses may hold it
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


class _Forward:
    """One forward, by its number in the order they ran, and copies of the buffers before it. The graph that it made holds it, so that it goes where the graph goes.

    It enters itself in `used` when a backward pass comes through.
    """

    def __init__(self, number: int, before: dict[str, Copy], used: list[_Forward]) -> None:
        self.number, self.before, self._used = number, before, used

    def __call__(self, grad: Tensor) -> None:
        if self not in self._used:
            self._used.append(self)


class Buffers:
    """The buffers of a model, of any dtype, and what the forwards of this step made of them.

    A forward belongs to the step if a backward pass comes through its output, or its graph waits for one. Other forwards, and writes
    in between, belong to no step. Copies are taken of what moved, so buffers that are never written cost one copy in all; the
    statistics of batch norm are copied in every step, and so are buffers that one of the first forwards wrote behind the
    version counter's back, as `buffer.data.mul_(0.9)` does.

    Args:
        restores: whether a void step gives them back; else whatever was written stays.

    Attributes:
        slots: by the buffers' names; empty for a model without buffers, whose transactions need not be opened.
        registries: of each module's own buffers, where new ones turn up.
    """

    def __init__(self, model: nn.Module, *, restores: bool = True) -> None:
        self._model, self._restores = model, restores
        self.slots: dict[str, Slot] = {}
        self._exempt: set[str] = set()
        self._used: list[_Forward] = []
        self._alive: list[weakref.ref[_Forward]] = []
        self._count = 0
        self._renewed: _Look | None = None
        self._found: tuple[_Look, list[tuple[Slot, Copy]], set[str]] | None = None
        self.rescan()
        self.forgive()

    def rescan(self) -> None:
        """Find the buffers anew, since modules or buffers came or went. Host only."""
        known, self.slots = self.slots, {}
        self._left: _Look | None = None
        for prefix, module in self._model.named_modules():
            for key in own_buffers(module):
                name = f"{prefix}.{key}" if prefix else key
                slot = known.get(name)
                if slot is None or slot.module is not module:
                    slot = Slot(name, module, key, isinstance(module, NormBase))
                    self._exempt.add(name)  # nobody knows yet what it is meant to hold
                self.slots[name] = slot
        self._places = [(slot.module, slot.key) for slot in self.slots.values()]
        self.registries = [own_buffers(module) for module in self._model.modules()]
        self._num_registered = sum(map(len, self.registries))

    def forgive(self) -> None:
        """Take the buffers as they are, and what is not finite in them as meant, such as a mask of -inf. Syncs: yes."""
        self._close()
        self._exempt = {name for name, slot in self.slots.items() if not slot.copy.is_finite()}

    def begin(self) -> Callable[[object], None] | None:
        """Take note of a forward that begins; return what must be called with its output, None if it can be part of no step. Syncs: no."""
        if functorch_level() is not None or not torch.is_grad_enabled():
            self._expect_statistics()
            return None
        self._notice_others()
        if self._used:  # what was there before the step's first forward is known
            self._expect_statistics()
            return lambda output: self._leave()
        self._renew()
        forward = _Forward(self._count, self.copies(), self._used)
        self._count += 1
        self._expect_statistics()
        return partial(self._end, forward)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count what is written inside the block as the step's: recompute in backward, a batch run again. Syncs: no."""
        self._notice_others()
        try:
            yield
        finally:
            self._leave()

    def written(self) -> list[Tensor]:
        """Return the floating buffers that the step may have written and must be finite. Syncs: no."""
        if not self._restores:
            return []
        moved, unlike = self._find()
        self._found = None if self._left is None else (self._left, moved, unlike)
        names = self._exempt | unlike
        buffers = buffers_at([(slot.module, slot.key) for slot, _ in moved if slot.name not in names])
        return [buffer for buffer in buffers if buffer is not None and buffer.is_floating_point()]

    def settle(self, void: Tensor | bool) -> None:
        """Close the transaction: give the buffers that the step wrote their old values if it is void: not 0, on any device, or known to the host.

        Writes: the buffers. Syncs: only where one has another shape or dtype than before.
        """
        found = self._found if self._found is not None and self._found[0] is self._left and self._is_left() else None
        moved, unlike = self._find() if found is None else found[1:]
        self._exempt |= unlike
        if moved and self._restores:
            restore_(moved, void)
        self._close()

    def renew(self) -> None:
        """Take every buffer as it is, and copies of all of them. Syncs: no."""
        for slot in self.slots.values():
            slot.is_stale = True
        self._close()

    def copies(self) -> dict[str, Copy]:
        """Return the newest copies of the buffers, by name. Host only."""
        return {name: slot.copy for name, slot in self.slots.items()}

    def note_replay(self, copies: Mapping[str, Copy]) -> None:
        """Take the buffers for what a replay made of them, which has renewed these copies of them. Host only."""
        self._used.clear()
        self._alive.clear()
        for name, slot in self.slots.items():
            slot.copy, slot.is_stale = Copy(stamp_of(slot.buffer), copies[name].value), False
            slot.leave()
        self._left, self._last = None, self.copies()

    def abandon(self) -> None:
        """Forget the backward passes so far; a forward whose loss is still to come stays known. Host only."""
        self._used.clear()

    def nonfinite_counts(self) -> dict[str, Tensor]:
        """Return how many elements of each buffer were inf or NaN before this step: shape (), int64. Syncs: no."""
        first = min(self._open(), key=lambda forward: forward.number, default=None)
        before = self.copies() if first is None else first.before
        kept = {name: copy.value for name, copy in before.items() if name not in self._exempt}
        return {name: (~held_once(value).isfinite()).sum() for name, value in kept.items() if value is not None}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype that each buffer had at first, or that the last forward which assigned it gave it."""
        return {name: slot.dtype for name, slot in self.slots.items() if slot.dtype is not None}

    def _end(self, forward: _Forward, output: object) -> None:
        self._leave()
        if forward.number < _FIRST_FORWARDS:
            self._notice_silent_writes(forward.before)
        if not any(slot.is_moved(forward.before.get(name, ABSENT)) for name, slot in self.slots.items()):
            return
        leaves = [output] if type(output) is Tensor else tree_leaves(output)
        in_graph = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        for tensor in in_graph:
            tensor.register_hook(forward)  # type: ignore[no-untyped-call]  # torch's own
        if in_graph:
            self._alive = [ref for ref in self._alive if ref() is not None]
            self._alive.append(weakref.ref(forward))
        elif not all(isinstance(leaf, (Tensor, int, float, str)) for leaf in leaves):
            self._used.append(forward)  # who knows what leads to its loss

    def _open(self) -> list[_Forward]:
        alive = [forward for ref in self._alive if (forward := ref()) is not None]
        return [*alive, *(forward for forward in self._used if forward not in alive)]

    def _find(self) -> tuple[list[tuple[Slot, Copy]], set[str]]:
        """Return the buffers that the step wrote, with what they were, and the names of those that are no longer like it."""
        moved = self._moved()
        now = buffers_at([(slot.module, slot.key) for slot, _ in moved])
        return moved, {s.name for (s, was), buffer in zip(moved, now, strict=True) if not is_alike(was.value, buffer)}

    def _moved(self) -> list[tuple[Slot, Copy]]:
        first = min(self._open(), key=lambda forward: forward.number, default=None)  # of any loss
        if first is None:  # a compiled model shows none of its forwards
            last = [(slot, self._last.get(name, ABSENT)) for name, slot in self.slots.items()]
            return [(slot, was) for slot, was in last if slot.is_moved(was)]
        slots = [(slot, first.before.get(name, ABSENT)) for name, slot in self.slots.items()]
        is_left = self._is_left()
        return [(slot, was) for slot, was in slots if slot.is_moved(was) and (is_left or not slot.is_foreign())]

    def _notice_others(self) -> None:
        """Take what somebody else wrote since the step last left the buffers for what was there before it."""
        if self._is_left():
            return
        foreign = [slot for slot in self.slots.values() if slot.is_foreign()]
        self._leave_slots()
        forwards = self._open() if foreign else []
        ddp = active_ddp() if forwards else None
        if not forwards or (ddp is not None and ddp.broadcast_buffers):  # which sends what the step wrote
            return
        take_copies(foreign)
        for forward in forwards:
            forward.before.update({slot.name: slot.copy for slot in foreign})

    def _notice_silent_writes(self, before: Mapping[str, Copy]) -> None:
        """Copy from now on what a forward has written without a new version. Syncs: yes."""
        for name, slot in self.slots.items():
            was, buffer = before.get(name, ABSENT), slot.buffer
            if slot.is_statistic or not was.is_of(buffer) or was.value is None or buffer is None:
                continue
            if is_alike(was.value, buffer) and not torch.equal(was.value, buffer):
                slot.is_statistic = slot.is_stale = True

    def _expect_statistics(self) -> None:
        self._found = None
        for slot in self.slots.values():
            slot.is_stale = slot.is_stale or (slot.is_statistic and slot.module.training)

    def _leave(self) -> None:
        """Take the buffers as they are for what the step made of them."""
        if sum(map(len, self.registries)) != self._num_registered:
            self.rescan()
        self._leave_slots(assigned=True)

    def _look(self) -> _Look:
        """Return the buffers as they are. Host only: of all of them at once, since a step asks five times."""
        buffers = buffers_at(self._places)
        return buffers, versions_of(buffers)

    def _is_left(self) -> bool:
        """Whether all buffers are as the step left them, none of them foreign. Host only."""
        return self._left is not None and _is_same(self._look(), self._left)

    def _leave_slots(self, assigned: bool = False) -> None:
        now = self._look()
        if self._left is not None and _is_same(now, self._left):
            return
        before: _Look = ([ABSENT] * len(now[0]), now[1]) if self._left is None else self._left
        for slot, buffer, version, was, old in zip(self.slots.values(), *now, *before, strict=True):
            if buffer is not was or version != old:
                slot.leave(assigned)
        self._left = now

    def _renew(self) -> None:
        is_stale = any([slot.is_stale for slot in self.slots.values()])
        if is_stale or self._renewed is None or self._renewed is not self._left:
            take_copies([slot for slot in self.slots.values() if slot.is_stale or not slot.copy.is_of(slot.buffer)])
            self._renewed = self._left

    def _close(self) -> None:
        self._leave_slots()
        self._renew()  # which may find no memory, and then can be asked again
        self._last = self.copies()
        self._used.clear()
        self._alive.clear()
        self._found = None
