"""Values in a wider format: beside those that live tensors hold, and of ops that are run again in it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch import storage_id
from ..formats import LOW_DTYPES
from .fix import edit_of
from .measure import finite, is_finite, rerun_wide
from .ops import CASTS, Call, is_product
from .records import Site


def flat(tensor: Tensor) -> Tensor:
    """Return the whole storage behind a tensor, as a view. Syncs: no."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def at(values: Tensor, like: Tensor) -> Tensor | None:
    """Return the view of a flat tensor that lies where `like` lies; None if its memory was made larger since. Syncs: no."""
    last = like.storage_offset() + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    is_there = not like.numel() or last < values.numel()
    return values.as_strided(like.shape, like.stride(), like.storage_offset()) if is_there else None


class WideValues:
    """A flat tensor beside each storage that would hold something else in a wider format.

    It has the layout of the storage, so a view of one is the same view of the other. Syncs: no.
    """

    def __init__(self) -> None:
        self.notes: StorageNotes[tuple[int, Tensor]] = StorageNotes()

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
        view = self.get(tensor)
        if view is None or view.dtype != values.dtype:
            known = flat(tensor).to(values.dtype, copy=True)
            self.notes.note(tensor, (tensor.itemsize, known))
            view = at(known, tensor)
            assert view is not None  # made from this storage
        view.copy_(values)

    def put_results(self, call: Call, wide: Sequence[Tensor] | None) -> None:
        """Note what the results of an op would hold; that they hold what they should where that is not known. Syncs: no."""
        if wide is None:
            forget_results(call, self)
        for tensor, values in zip(call.out, wide or (), strict=False):
            self.put(tensor, values)

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

    def first(self, tensors: Iterable[Tensor]) -> T | None:
        """Return the first note on the memory of some tensors. Syncs: no."""
        return next((note for note in map(self.get, tensors) if note is not None), None)

    def read_by(self, call: Call) -> list[tuple[Tensor, T]]:
        """Return the inputs of an op on whose memory there are notes, with these. Syncs: no."""
        return [(t, note) for _, t in call.inputs if (note := self.get(call.original(t))) is not None]

    def note(self, tensor: Tensor, value: T) -> None:
        """Write a note on a tensor's memory over any older one. Syncs: no."""
        ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own
        self._notes[ref.cdata] = (ref, value)
        if len(self._notes) > self._limit:
            self.drop_gone()
            self._limit = max(256, 2 * len(self._notes))

    def forget(self, tensor: Tensor) -> None:
        """Drop the note on a tensor's memory. Syncs: no."""
        if self._notes:
            self._notes.pop(storage_id(tensor), None)

    def drop_gone(self, others: StorageNotes[Any] | None = None) -> None:
        """Drop the notes on memory that is no more in use, or that `others` has one on."""
        written = others._notes if others is not None else {}
        self._notes = {k: v for k, v in self._notes.items() if k not in written and not _is_gone(v[0])}

    def live(self) -> list[T]:
        """Return the notes on memory that is still in use."""
        return [value for ref, value in self._notes.values() if not _is_gone(ref)]


Ops = Sequence[tuple[Site, Call]]
_CLOSE = 1 / 16
"""How far from the result of all in fp32 that of some may lie: what is finite by chance is not with the next batch."""


def draws(call: Call) -> bool:
    """Say whether an op's result depends on random numbers; attention without dropout only might."""
    is_attention = "dropout_p" in call.facts.arguments
    return call.facts.draws and not (is_attention and call.named.get("dropout_p", 0.0) == 0.0)


def run_wide(call: Call, values: dict[int, Tensor], dtype: torch.dtype) -> list[Tensor] | None:
    """Run an op in a wider format with some inputs exchanged, on the draws of the run.

    `values` are put in the place of arguments, by their ids; the format is fp32 or fp64.

    Returns:
        One tensor for each of `call.out`; None where the format has no kernel, or cannot have the same draws: those of
        fused dropout are known, since it returns its mask.

    Syncs: no.
    """
    if call.facts.kernel == "aten.native_dropout":
        source, share = values.get(id(call.args[0]), call.args[0]), float(call.args[1])
        return [source.to(dtype) * call.returned[1] / (1 - share if share < 1 else 1)]
    if draws(call):
        return None
    wide = rerun_wide(call, dtype, call.given_with(values))
    is_same = wide is not None and [t.shape for t in wide] == [t.shape for t in call.out]
    return wide if is_same else None


run_in_fp32 = partial(run_wide, dtype=torch.float32)


def is_repaired(call: Call, wide: list[Tensor] | None) -> bool:
    """Say whether results in fp32 are finite where those of the op are not. Syncs: yes."""
    return wide is not None and all(is_finite(w[~finite(t)]) for t, w in zip(call.out, wide, strict=True))


class Widening:
    """Runs the last ops of a module again, some of them in fp32; the one that failed is the last."""

    def __init__(self, made: Ops) -> None:
        self._made = made

    @property
    def is_enough(self) -> bool:
        """Whether the one that failed is finite with all of them in fp32, the program's own casts too. Syncs: yes."""
        wide = self._run(self._made, lambda *_: True)
        return wide is not None and all(map(is_finite, wide))

    def one_op(self) -> tuple[Site, ...]:
        """Return the last op whose result, kept in fp32, would have spared the one that failed. Syncs: yes."""
        for index in reversed(range(len(self._made))):
            first = self._made[index][1]
            if not any(t.dtype in LOW_DTYPES for t in first.out):
                continue
            wide = self._run(self._made[index:], partial(_follows, first))
            if wide is not None and all(map(is_finite, wide)):
                return (self._made[index][0],)
        return ()

    def some_ops(self) -> tuple[Site, ...]:
        """Return an op for each of the fewest rules under which the one that failed gives what it does with all of them. Syncs: yes."""
        rules = {rule: site for site, _ in reversed(self._made) if (rule := edit_of(site))}
        want = self._under(rules)
        if want is None or not all(map(is_finite, want)):
            return ()
        for rule in list(rules):
            fewer = {name: site for name, site in rules.items() if name != rule}
            if _are_close(self._under(fewer), want):
                rules = fewer
        return tuple(reversed(rules.values()))

    def _under(self, rules: Container[str]) -> list[Tensor] | None:
        """Return what the last op gives under rules: an op without one takes fp32 where it is given some, a product does not."""

        def is_wide(site: Site, call: Call, known: dict[int, Tensor]) -> bool:
            by_hand = call.facts.name == "to" and site.called in CASTS
            return edit_of(site) in rules or (bool(known) and not by_hand and not is_product(call.func))

        return self._run(self._made, is_wide)

    def _run(self, made: Ops, is_wide: Callable[[Site, Call, dict[int, Tensor]], bool]) -> list[Tensor] | None:
        values, wide = WideValues(), None
        for site, call in made:
            known = values.known(call)
            wide = run_in_fp32(call, known) if is_wide(site, call, known) else None
            values.put_results(call, wide)
        return wide


def _follows(first: Call, _: Site, call: Call, known: dict[int, Tensor]) -> bool:
    return bool(known) or call is first


def _are_close(found: list[Tensor] | None, want: list[Tensor]) -> bool:
    pairs = () if found is None else zip(found, want, strict=True)
    return found is not None and all(bool(((f - w).abs() <= _CLOSE * w.abs()).all()) for f, w in pairs)
