"""Buffers as a transaction: what the forwards of a skipped step wrote is taken back, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .._torch import NormBase, active_ddp, functorch_level, own_buffers, tree_leaves
from ..stamp import Stamp
from .copies import choose_, copies_of, is_plain


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A buffer as it was.

    Attributes:
        stamp: of the tensor then; None for a buffer of None.
        value: what it held.
        is_registered: whether the module had such a buffer.
    """

    stamp: Stamp | None
    value: Tensor | None
    is_registered: bool = True

    def is_of(self, buffer: Tensor | None) -> bool:
        """Whether a buffer is the tensor that was copied, as it was. Host only."""
        return self.is_registered and _is_current(self.stamp, buffer)

    def is_finite(self) -> bool:
        """Whether there was a value of numbers that can be looked at, and no inf or NaN in it. Syncs: yes."""
        return self.value is not None and is_plain(self.value) and bool(self.value.isfinite().all())


_FIRST_FORWARDS = 3
"""Forwards after which the values of buffers are compared too, not only their versions."""
ABSENT = Copy(None, None, is_registered=False)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a buffer in a module.

    Attributes:
        name: in the model.
        module: that owns it.
        key: its name there.
        is_statistic: written without a new version: by batch norm's kernel, or by a forward through `.data`.
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
    _left: Stamp | None = None

    @property
    def buffer(self) -> Tensor | None:
        """The tensor that is there now. Host only."""
        return own_buffers(self.module).get(self.key)

    def leave(self, assigned: bool = False) -> None:
        """Take the buffer as it is for the last that is known of it. Host only.

        Args:
            assigned: if it is another tensor, a forward put it there.
        """
        buffer = self.buffer
        if buffer is not None and self.dtype is not None and self._left is not None and self._left.is_current(buffer):
            return
        is_another = buffer is not None and (self._left is None or not self._left.is_of(buffer))
        if buffer is not None and (self.dtype is None or (assigned and is_another)):
            self.dtype = buffer.dtype
        self._left = _stamp(buffer)

    def is_foreign(self) -> bool:
        """Whether somebody wrote or replaced the buffer since the step left it. Host only."""
        return not _is_current(self._left, self.buffer)

    def is_moved(self, before: Copy) -> bool:
        """Whether the buffer is not, or may not be, what it was in a copy. Host only."""
        return self.is_stale or (self.is_statistic and before is not self.copy) or not before.is_of(self.buffer)

    def restore(self, before: Copy, void: Tensor | bool) -> None:
        """Give the buffer back what it was, where `void` is true.

        Writes: the buffer, or the module's. Syncs: only if shape or dtype are others now.
        """
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
    """Copy the buffers of slots as they are. Writes: the slots. Syncs: no."""
    buffers = [slot.buffer for slot in slots]
    values = iter(copies_of([buffer for buffer in buffers if buffer is not None]))
    for slot, buffer in zip(slots, buffers, strict=True):
        slot.copy, slot.is_stale = Copy(_stamp(buffer), None if buffer is None else next(values)), False


def is_alike(value: Tensor | None, buffer: Tensor | None) -> bool:
    """Whether two tensors can be copied into each other: plain ones of one shape, dtype and device. Host only."""
    if value is None or buffer is None or value.dtype is not buffer.dtype or value.device != buffer.device:
        return False
    return is_plain(value) and is_plain(buffer) and value.shape == buffer.shape


def _stamp(buffer: Tensor | None) -> Stamp | None:
    return None if buffer is None else Stamp.of(buffer)


def _is_current(stamp: Stamp | None, buffer: Tensor | None) -> bool:
    return stamp is None if buffer is None else stamp is not None and stamp.is_current(buffer)


class _Forward:
    """One forward, and the buffers before it. The graph that it made holds it, so that it goes where the graph goes.

    Args:
        number: of the forward, in the order they ran.
        before: copies of the buffers by name.
        used: where it enters itself when a backward pass comes through.
    """

    def __init__(self, number: int, before: dict[str, Copy], used: list[_Forward]) -> None:
        self.number = number
        self.before = before
        self._used = used

    def __call__(self, grad: Tensor) -> None:
        """Take note of a backward pass."""
        if self not in self._used:
            self._used.append(self)


class Buffers:
    """The buffers of a model, of any dtype, and what the forwards of this step made of them.

    A forward belongs to the step if a backward pass comes through its output. Others, and whoever writes in between,
    are nobody's step. Copies are taken of what moved, so buffers that are never written cost one copy in all; the
    statistics of batch norm are copied in every step, and so are buffers that one of the first forwards wrote behind the
    version counter's back, as `buffer.data.mul_(0.9)` does.

    Args:
        model: where the buffers are, and where others may turn up.

    Attributes:
        slots: by the buffers' names; empty for a model without buffers, whose transactions need not be opened.
        registries: of each module's own buffers, where new ones turn up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.slots: dict[str, Slot] = {}
        self._exempt: set[str] = set()
        self._used: list[_Forward] = []
        self._alive: list[weakref.ref[_Forward]] = []
        self._count = 0
        self.rescan()
        self.forgive()

    def rescan(self) -> None:
        """Find the buffers anew, since modules or buffers came or went. Host only."""
        known, self.slots = self.slots, {}
        for prefix, module in self._model.named_modules():
            for key in own_buffers(module):
                name = f"{prefix}.{key}" if prefix else key
                slot = known.get(name)
                if slot is None or slot.module is not module:
                    slot = Slot(name, module, key, isinstance(module, NormBase))
                    self._exempt.add(name)  # nobody knows yet what it is meant to hold
                self.slots[name] = slot
        self.registries = [own_buffers(module) for module in self._model.modules()]
        self._num_registered = sum(map(len, self.registries))

    def forgive(self) -> None:
        """Take the buffers as they are, and what is not finite in them as meant, such as a mask of -inf. Syncs: yes."""
        self._close()
        self._exempt = {name for name, slot in self.slots.items() if not slot.copy.is_finite()}

    def begin(self) -> Callable[[object], None] | None:
        """Take note of a forward that begins.

        Returns:
            What must be called with its output; None if it can be part of no step.

        Syncs: no.
        """
        if functorch_level() is not None or not torch.is_grad_enabled():
            self._expect_statistics()
            return None
        self._notice_others()
        if self._used:  # what was there before the step's first forward is known
            self._expect_statistics()
            return lambda output: self._leave()
        self._renew()
        forward = _Forward(self._count, self._copies(), self._used)
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
        return [
            buffer
            for slot, before in self._moved()
            if slot.name not in self._exempt
            and (buffer := slot.buffer) is not None
            and buffer.is_floating_point()
            and is_alike(before.value, buffer)
        ]

    def settle(self, void: Tensor | bool) -> None:
        """Close the transaction: give the buffers that the step wrote their old values if it is void.

        Args:
            void: shape (), any device, not 0 if the step was skipped; or a bool where the host knows.

        Writes: the buffers. Syncs: only where one has another shape or dtype than before.
        """
        moved = self._moved()
        self._exempt |= {slot.name for slot, before in moved if not is_alike(before.value, slot.buffer)}
        if moved:
            restore_(moved, void)
        self._close()

    def renew(self) -> None:
        """Take every buffer as it is, and copies of all of them. Syncs: no."""
        for slot in self.slots.values():
            slot.is_stale = True
        self._close()

    def copies(self) -> dict[str, Copy]:
        """Return the copies of the buffers as the last step left them, by name. Host only."""
        return self._copies()

    def take(self, copies: Mapping[str, Copy]) -> None:
        """Take the buffers for what a replay made of them, which has renewed these copies of them. Host only."""
        self._used.clear()
        self._alive.clear()
        for name, slot in self.slots.items():
            slot.copy, slot.is_stale = Copy(_stamp(slot.buffer), copies[name].value), False
            slot.leave()
        self._last = self._copies()

    def abandon(self) -> None:
        """Forget the backward passes so far; a forward whose loss is still to come stays known. Host only."""
        self._used.clear()

    def nonfinite_counts(self) -> dict[str, Tensor]:
        """Return how many elements of each buffer were inf or NaN before this step: shape (), int64. Syncs: no."""
        return {
            name: (~slot.copy.value.isfinite()).sum()
            for name, slot in self.slots.items()
            if name not in self._exempt and slot.copy.value is not None
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return every buffer by name. Host only."""
        return {name: buffer for name, slot in self.slots.items() if (buffer := slot.buffer) is not None}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype that each buffer had at first, or that the last forward which assigned it gave it."""
        return {name: slot.dtype for name, slot in self.slots.items() if slot.dtype is not None}

    def _end(self, forward: _Forward, output: object) -> None:
        self._leave()
        if forward.number < _FIRST_FORWARDS:
            self._notice_silent_writes(forward.before)
        if not any(slot.is_moved(forward.before.get(name, ABSENT)) for name, slot in self.slots.items()):
            return
        leaves = tree_leaves(output)
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

    def _moved(self) -> list[tuple[Slot, Copy]]:
        """Return the buffers that the step wrote, with what they were."""
        forwards = self._used or self._open()  # of a backward that raised on its way to the output
        if not forwards:  # a compiled model shows none of its forwards
            return [(slot, self._last[name]) for name, slot in self.slots.items() if slot.is_moved(self._last[name])]
        before = min(forwards, key=lambda forward: forward.number).before
        slots = [(slot, before.get(name, ABSENT)) for name, slot in self.slots.items()]
        return [(slot, was) for slot, was in slots if slot.is_moved(was) and not slot.is_foreign()]

    def _notice_others(self) -> None:
        """Take what somebody else wrote since the step last left the buffers for what was there before it."""
        foreign = [slot for slot in self.slots.values() if slot.is_foreign()]
        for slot in foreign:
            slot.leave()
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
        for slot in self.slots.values():
            slot.is_stale = slot.is_stale or (slot.is_statistic and slot.module.training)

    def _leave(self) -> None:
        """Take the buffers as they are for what the step made of them."""
        if sum(map(len, self.registries)) != self._num_registered:
            self.rescan()
        for slot in self.slots.values():
            slot.leave(assigned=True)

    def _renew(self) -> None:
        take_copies([slot for slot in self.slots.values() if slot.is_stale or not slot.copy.is_of(slot.buffer)])

    def _copies(self) -> dict[str, Copy]:
        return {name: slot.copy for name, slot in self.slots.items()}

    def _close(self) -> None:
        self._used.clear()
        self._alive.clear()
        for slot in self.slots.values():
            slot.leave()
        self._renew()
        self._last = self._copies()
