"""Updates of weights and states that 16 bit rounds away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._torch import own_buffers, own_parameters, storage_id, unwrapped, version
from ..formats import LOW_DTYPES, dtype_name
from ..optim import parameters
from .frames import Owner, caller
from .lint_rules import LintWatch
from .measure import rerun_wide
from .ops import Call, floating
from .records import LostUpdate, Site
from .wide_values import StorageNotes, WideValues, flat, run_in_fp32

ADDITIONS = frozenset({"add", "sub", "lerp", "addcmul", "addcdiv"})
FACTORS = frozenset({"mul", "div"})
_HANDED_ON = frozenset({"where", "clamp", "clamp_min", "clamp_max", "masked_fill"})
"""Ops between two additions that leave most of a state as it is, as the reset of a neuron that spiked."""
STEPS = 64
"""Additions to one state that are lost one after another: more than a network has layers whose start is small."""
ELEMENTWISE = ADDITIONS | _HANDED_ON | FACTORS | {"rsub", "neg", "to", "copy", "clone"}
"""Ops by which a forward computes what a state of its own holds next."""
_WHOLE = 1 - 2.0**-5
"""Share of a state that is kept from call to call, from which on what is added to it adds up: with less, it comes near where it goes."""
_MOVED = 2.0**-18
"""A change by less is rounding in fp32."""


class _Row(NamedTuple):
    """Updates of one tensor that were lost one after another: how many, and the last: its `counts`, and where it was."""

    times: int
    counts: tuple[int, int]
    site: Site


def _to_tell(last: _Row, now: _Row, least: int = 2) -> tuple[_Row, ...]:
    """Return what a row has to tell after one more update: nothing of fewer than the least, and of the first once there is a second."""
    if now.times < least:
        return ()
    is_second = now.times == 2 and (last.site.frame, last.site.op) == (now.site.frame, now.site.op)
    return (last, now) if is_second else (now,)


class UpdateWatch:
    """Compares what one optimizer step meant to write, in fp32, with what 16-bit weights hold after it.

    So it does with what a program adds by hand, outside of modules, to a weight or a running average, from the second time on.
    """

    def __init__(self) -> None:
        self.lost: dict[tuple[object, ...], LostUpdate] = {}
        self.is_own = ""
        self._by_hand: StorageNotes[tuple[_Row, int]] = StorageNotes()
        self._chains: StorageNotes[tuple[object, int]] = StorageNotes()
        self._before: dict[int, Tensor] = {}
        self._intended: dict[int, Tensor] = {}
        self._gradients: set[int] = set()
        self._added: StorageNotes[set[int]] = StorageNotes()
        self._keepers: StorageNotes[set[int]] = StorageNotes()

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep copies of the 16-bit weights an optimizer is about to update; mezzo's own keep what the weight cannot hold."""
        self._clear()
        home = type(optimizer).__module__.partition(".")[0]
        self.is_own = "" if home in ("torch", "mezzo") else type(optimizer).__name__
        if home == "mezzo":
            return
        for p in parameters(optimizer):
            if p.dtype in LOW_DTYPES and p.grad is not None:
                self._before[id(p)] = p.detach().clone()
                self._gradients.update(storage_id(values) for _, values in floating(p.grad))

    def see(self, call: Call, site: Site, name_of: Callable[[Tensor], str]) -> None:
        """Take in one op, given what tensors are called. Syncs: where it adds to 16 bit in a forward or by hand."""
        if site.phase == "optimizer":
            self._see_step(call)
        elif site.phase == "forward":
            self._see_chain(call, site)
            self._see_by_hand(call, site, name_of)

    def _see_step(self, call: Call) -> None:
        """Take in one op of the step: which weights would it have changed in fp32?"""
        if not call.facts.writes or not self._before:
            return
        for tensor in call.out:
            self._note_keeper(tensor, self._added.get(tensor))
        weights = {id(t) for t in call.out} & self._before.keys()
        if not weights:
            return
        self._see_sources(call, weights)
        wide = rerun_wide(call, torch.float32)
        if wide is None or len(wide) != len(call.out):
            return
        for tensor, want in zip(call.out, wide, strict=True):
            before = self._before.get(id(tensor))
            if before is not None:
                meant = want != before.float()
                self._intended[id(tensor)] = self._intended.get(id(tensor), torch.zeros_like(meant)) | meant

    def _see_sources(self, call: Call, weights: set[int]) -> None:
        """Note what weights are changed by, as it may hold what they cannot.

        A copy of something wider is rounded from a master. What is added to a weight and written again after that is the
        remainder of a compensated sum, if it is no gradient that the step clears.
        """
        is_copy = call.facts.name.removeprefix("foreach_") == "copy"
        for source in (t for _, t in call.inputs if call.original(t) is t and storage_id(t) not in self._gradients):
            if not is_copy:
                self._added.note(source, weights)
            elif source.dtype not in LOW_DTYPES:
                self._note_keeper(source, weights)

    def _note_keeper(self, tensor: Tensor, weights: set[int] | None) -> None:
        if weights is not None:
            self._keepers.note(tensor, weights | (self._keepers.get(tensor) or set()))

    def _clear(self) -> None:
        self._before.clear()
        self._intended.clear()
        self._gradients.clear()
        self._added, self._keepers = StorageNotes(), StorageNotes()

    def _see_by_hand(self, call: Call, site: Site, name_of: Callable[[Tensor], str]) -> None:
        """Take in an op outside of modules and optimizers, which adds to 16 bit that no gradient goes through."""
        name = call.facts.name.removeprefix("foreach_")
        is_update = call.facts.writes and name in ADDITIONS | FACTORS
        if site.root or not is_update or caller()[0] is Owner.MEZZO:
            return
        before = {id(t): kept for _, kept in call.inputs if (t := call.original(kept)) is not kept}
        kept = [t for t in call.out if id(t) in before and t.dtype in LOW_DTYPES]
        wide = rerun_wide(call, torch.float32) if kept else None
        if wide is None or any(t.requires_grad and torch.is_grad_enabled() for t in kept):
            return
        for tensor, want in zip(call.out, wide, strict=True):
            old = before[id(tensor)]
            counts = _counts(want != old.float(), tensor, old)
            last, at = self._by_hand.get(tensor) or (_Row(0, counts, site), version(tensor) - 1)
            called = name_of(tensor)
            # what was written in between, as gradients are before a clip, does not decay; a weight does, between the steps of an optimizer
            is_kept = name in ADDITIONS or at == version(tensor) - 1 or called.startswith("parameter")
            now = _Row(row_after(last.times, counts) if is_kept else 0, counts, site)
            self._by_hand.note(tensor, (now, version(tensor)))
            called = called.rpartition(" ")[2] or f"a tensor of {tuple(tensor.shape)}"
            for row in _to_tell(last, now, 2 if tensor.numel() > 1 else STEPS + 1):
                self.add(called, tensor, "the program", row.counts, row.site)

    def _see_chain(self, call: Call, site: Site) -> None:
        """Take in an op of a forward: a line that adds to a state again and again, as steps of an ODE, and does not move it."""
        out = call.out[0] if call.out else None
        if call.facts.name in _HANDED_ON and out is not None:
            chains = [chain for _, t in call.inputs if t.shape == out.shape and (chain := self._chains.get(t))]
            if chains:
                self._chains.note(out, chains[0])
        if call.facts.name not in ("add", "sub") or call.facts.writes or out is None or out.dtype not in LOW_DTYPES:
            return
        given = [t for _, t in call.inputs if t.shape == out.shape and t.dtype is out.dtype]
        if len(given) != 2 or out.numel() < 2 or not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
            return
        place = (str(site.frame), site.step)
        state, added = given
        if self._steps_of(state, place) is None and self._steps_of(added, place) is not None:
            state, added = added, state
        counts = _counts(added.detach() != 0, out, state)
        times = row_after(self._steps_of(state, place) or 0, counts)
        self._chains.note(out, (place, times))
        if times == STEPS:
            self.add(f"a state of {tuple(out.shape)}", out, "", counts, site)

    def _steps_of(self, state: Tensor, place: object) -> int | None:
        """Return how many steps in a row a line did not move a state; None where the line did not make it. Syncs: no."""
        at, times = self._chains.get(state) or (None, 0)
        return times if at == place else None

    def end(self, optimizer: torch.optim.Optimizer, names: dict[int, str], site: Site) -> None:
        """Count what was lost in the step that ended, and lives on nowhere. Syncs: yes."""
        kept = set().union(*self._keepers.live())
        for p in parameters(optimizer):
            meant = self._intended.get(id(p))
            if meant is not None and id(p) not in kept and bool(meant.any()):
                counts = _counts(meant, p, self._before[id(p)])
                self.add(names[id(p)], p, type(optimizer).__name__, counts, site)
        self._clear()

    def add(self, name: str, tensor: Tensor, optimizer: str, counts: tuple[int, int], site: Site) -> None:
        """Note a lost update: how many elements it meant to change, and how many of them it left; alike ones of a step as one. Host only."""
        key = name, optimizer, site.frame, site.op, site.step
        intended, lost = counts
        if (old := self.lost.get(key)) is not None:
            site, intended, lost = old.site, old.intended + intended, old.lost + lost
        dtype = dtype_name(tensor.dtype)
        update = LostUpdate(name=name, dtype=dtype, optimizer=optimizer, intended=intended, lost=lost, site=site)
        self.lost[key] = update


def _counts(meant: Tensor, now: Tensor, before: Tensor) -> tuple[int, int]:
    """Return how many elements an update means to change, and how many of them are as they were. Syncs: yes."""
    return int(meant.sum()), int((meant & (now.detach() == before.detach())).sum())


def counts_kept_whole(state: Tensor, before: Tensor, wide: Tensor, bumped: Tensor) -> tuple[int, int]:
    """Return how many elements of a state were to change, and how many of those it keeps whole are as they were. Syncs: yes."""
    old = before.float()
    meant = (wide - old).abs() > _MOVED * old.abs()
    is_whole = bumped - wide >= _WHOLE * (enlarged(before) - old)
    return int(meant.sum()), int((meant & is_whole & (state == before)).sum())


def row_after(times: int, counts: tuple[int, int]) -> int:
    """Return how many updates in a row were lost, after one more; 0 if that one reached half of what it meant to change."""
    return times + 1 if 2 * counts[1] > counts[0] else 0


def _states(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the 16-bit tensors in a model that no optimizer updates: buffers, frozen weights, plain attributes. Host only."""
    for path, module in root.named_modules():
        held = {**own_buffers(module), **own_parameters(module), **vars(module)}
        for key, t in held.items():
            is_low = isinstance(t, Tensor) and t.dtype in LOW_DTYPES and t.layout is torch.strided
            if is_low and not t.requires_grad and unwrapped(t) is t:  # what a transform hands in is no state
                yield f"{path}.{key}".lstrip("."), t


def enlarged(state: Tensor) -> Tensor:
    """Return a state a quarter larger, in fp32. Syncs: no."""
    wide = state.detach().float()
    return wide + 0.25 * torch.where(wide == 0, 1.0, wide.abs())


class _FromStates(NamedTuple):
    """Where a value was computed from states of the model, by which op, and from which."""

    site: Site
    kernel: str
    states: frozenset[str]


class StateWatch:
    """Compares what a forward computes in fp32 for a 16-bit state of its own, such as a running average, with what the state holds then.

    Whether the state is kept whole, so that what is added to it adds up, is told by a second run from a state a quarter larger.
    """

    def __init__(self, updates: UpdateWatch, lints: LintWatch) -> None:
        self._updates, self._lints = updates, lints
        self._last: dict[tuple[int, str], _Row] = {}
        self._held: StorageNotes[str] = StorageNotes()
        self._clear()

    def _clear(self) -> None:
        self._made: StorageNotes[_FromStates] = StorageNotes()
        self._before, self._wide, self._bumped = WideValues(), WideValues(), WideValues()

    def enter(self, root: nn.Module) -> None:
        """Take note of the states of an outermost module that is about to run. Syncs: no."""
        self._clear()
        self._held = StorageNotes()
        for name, state in _states(root):
            self._held.note(state, name)

    def see(self, call: Call, site: Site) -> None:
        """Take in one op: does it compute with a state, element by element? Syncs: no."""
        if not len(self._held) or site.phase != "forward":
            return
        sources = [t for _, t in call.inputs if self._states_in(call.original(t))]
        is_followed = bool(sources) and call.facts.name in ELEMENTWISE
        wide = run_in_fp32(call, self._wide.known(call)) if is_followed else None
        known = self._bumped.known(call)
        larger = {id(t): enlarged(t) for t in sources if id(t) not in known} if is_followed else {}
        bumped = run_in_fp32(call, larger | known) if wide else None
        for i, out in enumerate(call.out):
            source = next((t for t in sources if call.original(t) is out), None)
            source = next((t for t in sources if t.shape == out.shape), None) if source is None else source
            if wide is None or bumped is None or source is None:
                self._made.forget(out)
                continue
            before = self._before.get(call.original(source))
            if self._held.get(out) and self._made.get(out) is None:
                self._bumped.put(flat(out), enlarged(flat(out)))
            states = frozenset().union(*(self._states_in(call.original(t)) for t in sources))
            self._before.put(out, source.detach() if before is None else before)
            self._wide.put(out, wide[i])
            self._bumped.put(out, bumped[i])
            self._made.note(out, _FromStates(site, call.facts.kernel, states))

    def _states_in(self, tensor: Tensor) -> frozenset[str]:
        """Return the names of the states that a tensor is, or was computed from. Host only."""
        made, name = self._made.get(tensor), self._held.get(tensor)
        return made.states if made is not None else frozenset((name,)) if name is not None else frozenset()

    def leave(self, root: nn.Module) -> None:
        """Compare the states that the module, which has just run, computed from what they were. Syncs: where there are some."""
        made = {name: (state, found) for name, state in _states(root) if (found := self._made.get(state)) is not None}
        for name, (state, found) in made.items():
            # a remainder that is computed from a sum keeps what the sum cannot hold
            is_kept = any(name in other.states for key, (_, other) in made.items() if key != name)
            if name in found.states and not is_kept:
                self._compare((id(root), name), state.detach(), found)
        self._clear()

    def _compare(self, key: tuple[int, str], state: Tensor, made: _FromStates) -> None:
        before, wide, bumped = self._before.get(state), self._wide.get(state), self._bumped.get(state)
        assert before is not None and wide is not None and bumped is not None  # noted together
        counts = counts_kept_whole(state, before, wide, bumped)
        last = self._last.get(key, _Row(0, counts, made.site))
        self._last[key] = now = _Row(row_after(last.times, counts), counts, made.site)
        if self._lints.of_risks and 2 * counts_kept_whole(before, before, wide, bumped)[1] > counts[0]:
            self._lints.add("half-accumulator", made.site, state.dtype, key[1], 0.0, made.kernel)
        for row in _to_tell(last, now):
            self._updates.add(key[1], state, "the forward", row.counts, row.site)
