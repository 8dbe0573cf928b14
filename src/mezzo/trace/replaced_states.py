"""Averages and weights in 16 bit that a program replaces by sums it computes from them, outside of modules: whether they move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from .frames import Owner, caller
from .lost_updates import ADDITIONS, ELEMENTWISE, FACTORS, STEPS, UpdateWatch, counts_kept_whole, enlarged, row_after
from .ops import Call
from .records import Site
from .wide_values import StorageNotes, run_in_fp32

_SUMS = ADDITIONS | FACTORS | {"to", "copy"}
"""Ops whose result may be what a state holds next."""
_KEPT = 4
"""Lines whose results one value is followed from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Descent:
    """What a line made, under a number of its own, and what was computed from that since, beside it in fp32.

    Attributes:
        times: how many results of the line in a row were the one before.
        is_rest: whether results of several times meet in it, as in the remainder of a compensated sum.
    """

    serial: int
    times: int
    step: int
    name: str = ""
    before: Tensor | None = None
    wide: Tensor | None = None
    larger: Tensor | None = None
    is_rest: bool = False


class ReplacedStates:
    """Follows what a line outside of modules makes in 16 bit back to the same line, where no gradient goes through it."""

    def __init__(self, updates: UpdateWatch) -> None:
        self._updates = updates
        self._made: StorageNotes[dict[str, _Descent]] = StorageNotes()
        self._serial = 0

    def see(self, call: Call, site: Site, name_of: Callable[[Tensor], str]) -> None:
        """Take in one op. Syncs: where it makes what a line of the program replaces."""
        name, writes = call.facts.name, bool(call.facts.writes)
        if site.root or site.phase == "backward" or (site.phase == "optimizer" and not self._updates.is_own):
            return
        # a gradient may go through it to others before it; weights are leaves
        is_tracked = torch.is_grad_enabled() and any(t.requires_grad and not t.is_leaf for _, t in call.inputs)
        out = call.out[0] if len(call.out) == 1 and name in ELEMENTWISE and not is_tracked else None
        # what is added in place, or written by the step of an optimizer, is told by another watch
        if out is None or (writes and (site.phase == "optimizer" or (name != "copy" and out.dtype in LOW_DTYPES))):
            for tensor in call.out if writes else ():
                self._made.forget(tensor)
            return
        found = self._followed(call, out, name_of)
        line = f"{site.user} {site.library} {name}"
        if out.dtype in LOW_DTYPES and name in _SUMS:
            last, self._serial = found.pop(line, None), self._serial + 1
            times = 0 if last is None or last.is_rest else self._after(last, out, site)
            found[line] = _Descent(serial=self._serial, times=times, step=site.step)
        if found:
            self._made.note(out, dict(list(found.items())[-_KEPT:]))
        else:
            self._made.forget(out)

    def _followed(self, call: Call, out: Tensor, name_of: Callable[[Tensor], str]) -> dict[str, _Descent]:
        """Return by line what a result was computed from, in fp32. Syncs: no."""
        lines: dict[str, list[tuple[Tensor, _Descent]]] = {}
        for tensor in (t for _, t in call.inputs if t.shape == out.shape):
            for line, made in (self._made.get(call.original(tensor)) or {}).items():
                if made.wide is None:
                    old, name = tensor.detach().clone(), name_of(call.original(tensor))
                    made = replace(made, before=old, wide=old.float(), larger=enlarged(old), name=name)  # noqa: PLW2901
                lines.setdefault(line, []).append((tensor, made))
        found = {}
        for line, given in lines.items():
            wide = run_in_fp32(
                call, {id(t): m.wide for t, m in given if m.wide is not None and m.wide.shape == t.shape}
            )
            more = run_in_fp32(call, {id(t): m.larger for t, m in given if m.larger is not None})
            if wide and more:
                last = max((m for _, m in given), key=lambda m: m.serial)
                is_rest = any(m.is_rest or m.serial != last.serial for _, m in given)
                found[line] = replace(last, wide=wide[0], larger=more[0], is_rest=is_rest)
        return found

    def _after(self, last: _Descent, out: Tensor, site: Site) -> int:
        """Return how often in a row a line did not move what it replaces; name that where it is often enough. Syncs: yes."""
        assert last.before is not None and last.wide is not None and last.larger is not None  # since it was followed
        counts = counts_kept_whole(out.detach(), last.before, last.wide, last.larger)
        times = row_after(last.times, counts)
        # results of one step may be those of layers
        least = 2 if site.step > last.step and out.numel() > 1 else STEPS
        if times >= least and caller()[0] is not Owner.MEZZO:
            name = last.name.rpartition(" ")[2] or f"a tensor of {tuple(out.shape)}"
            self._updates.add(name, out, self._updates.is_own or "the program", counts, site)
        return times
