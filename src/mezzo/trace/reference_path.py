"""fp32 values carried from the inputs, op by op, and what an overflowed value would have been: the run without rounding."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formats import LOW_DTYPES, dtype_name, format_of, widened
from .measure import amax, finite, is_finite, length, numbers, rerun_wide, sanitised
from .ops import CASTS, FACTORIZATIONS, SPECTRA, Call, is_product
from .records import Flush, Site, Wide
from .wide_values import StorageNotes, Widening, WideValues, forget_results, is_repaired, run_in_fp32

_MOVES = ("index", "gather", "index_select", "take", "cat", "stack", "clone", "flip", "roll", "repeat", "embedding")
"""Ops that round nothing: what they hand on was made before."""
_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "square", "pow", "neg", "abs"})
"""Ops that may round nothing of what they are given, such as the square of 1."""
_FELT = 2.0**-10
"""Share of a tensor, in norms, from which on what an overflow left wrong in it is more than the rounding of fp16."""


@dataclass(frozen=True, slots=True)
class MadeBy:
    """An op that made a 16-bit value.

    Attributes:
        exact: the elements that it rounded nothing of, so that what is lost there was lost before; None for none.
        before: what made its operands.
    """

    site: Site
    exact: Tensor | None = None
    before: tuple[MadeBy, ...] = ()

    def sites(self, lost: Tensor) -> list[Site]:
        """Return it, behind those before it where it was given what was lost, each once. Syncs: yes."""
        found, seen, todo = list[Site](), set[int](), [(self, False)]
        while todo:
            maker, is_next = todo.pop()
            if is_next:
                found.append(maker.site)
            elif id(maker) not in seen:
                seen.add(id(maker))
                exact = maker.exact
                is_given = exact is not None and exact.shape == lost.shape and bool(exact[lost].all())
                todo += [(maker, True), *((one, False) for one in reversed(maker.before) if is_given)]
        return found


def vanishing_constant(call: Call, dtype: torch.dtype) -> float | None:
    """Return the first number among an op's arguments that is not 0 and rounds to 0 in a format."""
    half = format_of(dtype).smallest / 2
    return next((x for x in numbers(call.args, call.kwargs) if 0 < abs(x) <= half), None)


class ReferencePath:
    """Carries fp32 values along the forward, and remembers which of them 16 bit turned into 0.

    Whether a fault is one of precision or of arithmetic is decided by them: the op that failed is finite on them, or
    it is not.

    Attributes:
        inside: the last ops of the module that runs, and where they ran.
        low: the 16-bit format that was met last; fp16 before.
    """

    def __init__(self) -> None:
        self._wide = WideValues()
        self._flushes: StorageNotes[Flush] = StorageNotes()
        self._local = WideValues()
        self._makers: StorageNotes[MadeBy] = StorageNotes()
        self._written: StorageNotes[bool] = StorageNotes()
        self._absorbed: dict[Site, frozenset[int]] = {}
        self.low = torch.float16
        self._node: object = None
        self._tape: list[Call] = []
        self.inside: deque[tuple[Site, Call]] = deque(maxlen=64)

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor would hold; None where it holds that, or where nothing is known. Syncs: no."""
        return self._wide.get(tensor)

    def begin(self, tensor: Tensor, wide: Tensor, site: Site) -> None:
        """Take note of what a 16-bit tensor was made of, and where. Syncs: no."""
        self._wide.put(tensor, wide)
        self._makers.note(tensor, MadeBy(site))

    def cast_behind(self, tensor: Tensor) -> Site | None:
        """Return where the program cast what a tensor holds to 16 bit; None where an op computed it. Syncs: no."""
        maker = self._makers.get(tensor)
        return maker.site if maker is not None and maker.site.op == "to" else None

    def behind(self, tensors: Iterable[Tensor]) -> Flush | None:
        """Return the zero that 16 bit made and that one of these tensors came through. Syncs: no."""
        return self._flushes.first(tensors)

    def absorb(self, call: Call, site: Site, causes: frozenset[int]) -> None:
        """Take note of the events behind an infinity that an op turns into a 0 which fp32 does not have, as softplus(-inf) is. Syncs: no."""
        if causes and (flush := self.behind(call.out)) is not None and flush.site == site:
            self._absorbed[site] = causes

    def absorbed(self, call: Call) -> frozenset[int]:
        """Return the events behind the zero that an op was given; empty where no infinity is. Syncs: no."""
        flush = self.behind(call.originals)
        return frozenset() if flush is None else self._absorbed.get(flush.site, frozenset())

    def end_step(self) -> None:
        """Start anew with what was written: what such memory holds now is what the next step begins with.

        What was made once, as a schedule or a mask before the loop, is still what its fp32 values say.
        """
        for notes in (self._wide.notes, self._local.notes, self._flushes, self._makers):
            notes.drop_gone(self._written)
        self._written, self._tape = StorageNotes(), []

    def see(self, call: Call, site: Site) -> list[Tensor] | None:
        """Take in one op, and return its results in fp32, on fp32 inputs; None where they are not known to differ. Syncs: yes."""
        for tensor in call.out if call.facts.writes else ():
            self._written.note(tensor, True)
        if site.phase == "backward":
            forget_results(call, self._wide, self._flushes)
            return None
        known = self._wide.known(call)
        low = next((t.dtype for t in (*call.out, *(t for _, t in call.inputs)) if t.dtype in LOW_DTYPES), None)
        self.low = low or self.low
        wide = run_in_fp32(call, known) if known or low is not None else None
        if wide is None:
            forget_results(call, self._wide, self._flushes)
            return None
        if self.inside and self.inside[-1][0].path != site.path:
            self.inside.clear()
        if site.is_ruled:
            self.inside.append((site, call))
        inherited = self.behind(call.originals)
        local: list[Tensor] | None = None if known else wide
        for i, (tensor, value) in enumerate(zip(call.out, wide, strict=True)):
            lost = (tensor == 0) & (value != 0)
            if call.facts.name not in SPECTRA and bool(lost.any()):
                local = local or run_in_fp32(call, {}) or wide
                self._flushes.note(tensor, self._flush(call, site, tensor, lost, value, local[i], inherited))
                self._local.put(tensor, local[i])
            elif not call.facts.writes:
                self._flushes.forget(tensor)
            self._wide.put(tensor, value)
            if tensor.dtype in LOW_DTYPES or call.facts.name == "to":
                self._note_maker(call, site, i, local)
        return wide

    def _flush(
        self, call: Call, site: Site, tensor: Tensor, lost: Tensor, wide: Tensor, local: Tensor, inherited: Flush | None
    ) -> Flush:
        """Say where the zeros of a result come from: this op, one before it, or operands that rounding made equal."""
        is_here = tensor.dtype in LOW_DTYPES and bool((lost & (local != 0)).any())
        # eps added to what 16 bit made 0 before; that of an optimizer is added to what it may make 0
        is_other = site.phase == "forward" and bool((lost & ((local - wide).abs() > wide.abs() / 2)).any())
        if inherited is not None and (is_other or not is_here):
            is_new = is_product(call.func) and site not in inherited.carried
            return replace(inherited, carried=(*inherited.carried, site)) if is_new else inherited
        dtype = tensor.dtype if tensor.dtype in LOW_DTYPES else self.low
        makers = () if is_here else self._behind_zeros(call, lost, wide)
        return Flush(
            site=site,
            kernel=call.facts.kernel,
            dtype=dtype_name(dtype),
            share=int(lost.sum()) / lost.numel(),
            wide_amax=amax(wide[lost]),
            constant=vanishing_constant(call, dtype) if is_here else None,
            is_cancellation=not is_here,
            made_by=tuple(dict.fromkeys(site for maker in makers for site in maker.sites(lost))),
        )

    def _behind_zeros(self, call: Call, lost: Tensor, wanted: Tensor) -> tuple[MadeBy, ...]:
        """Return what made an op's operands, behind what fed its module where fp32 in the module alone would not bring the values back. Syncs: yes."""
        fed, wide = self._run_inside()
        is_left = any(v.shape == lost.shape and bool((v[lost].sign() != wanted[lost].sign()).any()) for v in wide)
        return (*(fed if is_left else ()), *self._made_by(call))

    def _run_inside(self) -> tuple[list[MadeBy], list[Tensor]]:
        """Run the last ops of the module in fp32; return what made what fed it, and the last results. Syncs: no."""
        values, wide = WideValues(), list[Tensor]()
        fed: dict[int, MadeBy] = {}
        for _, before in self.inside:
            known = values.known(before)
            given = (before.original(t) for _, t in before.inputs if id(t) not in known)
            fed |= {id(maker): maker for t in given if (maker := self._makers.get(t)) is not None}
            wide = run_in_fp32(before, known) or []
            values.put_results(before, wide)
        return list(fed.values()), wide

    def _note_maker(self, call: Call, site: Site, index: int, local: list[Tensor] | None) -> None:
        """Note the op that rounded a value: not one that moved or widened it, nor a cast that a region made for the op behind it."""
        makers, is_widened = self._made_by(call), call.out[index].dtype not in LOW_DTYPES
        if call.facts.name not in _MOVES and not is_widened:
            exact = self._exact(call, index, local) if makers else None
            makers = (MadeBy(site, exact, makers if exact is not None else ()),)
        if makers and (is_widened or site.op != "to" or site.called in CASTS):
            self._makers.note(call.out[index], makers[0])

    def _exact(self, call: Call, index: int, local: list[Tensor] | None) -> Tensor | None:
        """Return the elements of a result that an op of arithmetic, on one tensor or many at once, rounded nothing of. Syncs: no."""
        if call.facts.name not in _ARITHMETIC:
            return None
        found = run_in_fp32(call, {}) if local is None else local
        return None if found is None else found[index] == call.out[index]

    def _made_by(self, call: Call) -> tuple[MadeBy, ...]:
        found = {id(m): m for _, m in self._makers.read_by(call)}
        return tuple(found.values())

    def needs_fp32(
        self, call: Call, saved: Iterable[Tensor], judged: tuple[Wide | None, Flush | None], alone: Iterable[Wide]
    ) -> tuple[tuple[Site, ...], bool]:
        """Return what rules must cover where rounding alone moved an argument, or spoiled a matrix, and whether that was run.

        Of the op that failed, `saved` is what its forward op was given, if it is one of backward; `judged` is what `judge` returned, and
        `alone` the op in wider formats on what it was given, finite where it overflowed. Syncs: yes.
        """
        made = list(self.inside) if self.inside and self.inside[-1][1] is call else []
        widening = Widening(made)
        if call.facts.name in FACTORIZATIONS:
            return widening.one_op(), False
        reference, flush = judged
        if flush is not None or reference is None or not reference.is_finite or any(w.is_finite for w in alone):
            return (), False
        if tried := widening.some_ops():
            return tried, True
        # what made the argument that rounding moved: the program's own cast, what fed the module, the module's ops
        own = [maker for t in (*call.originals, *saved) if (maker := self._makers.get(t)) is not None]
        fed = [] if any(m.site.op == "to" for m in own) else self._run_inside()[0]
        fed = [m for m in fed if m.site.op != "to" or m.site.path != self.inside[-1][0].path]  # not by its own casts
        inside = [site for site, _ in made if site.op != "to" or widening.is_enough]
        return tuple(dict.fromkeys((*(m.site for m in (*fed, *own)), *inside))), False

    def is_local_enough(self, call: Call) -> bool:
        """Say whether an op is finite once the ops that made its operands ran in fp32 on what they were given. Syncs: yes."""
        values = self._local.known(call)
        return bool(values) and is_repaired(call, run_in_fp32(call, values))

    def enter_node(self, node: object, call: Call) -> None:
        """Keep the ops of the autograd node that runs; its forward's values are what they are judged with."""
        if node is not self._node:
            self._node, self._tape = node, []
        if node is not None and len(self._wide.notes):
            self._tape.append(call)

    def judge(self, call: Call, wide: list[Tensor] | None) -> tuple[Wide | None, Flush | None]:
        """Judge an op that made non-finite values from finite ones by what it gives on fp32 values.

        `wide` is what `see` returned for it; in backward it is the last op that `enter_node` took in.

        Returns the result on fp32 values where they are known, and the zero of 16 bit that it came through. Syncs: yes.
        """
        flush = self._decisive(call)
        if self._tape and self._tape[-1] is call:
            flush = flush or self.behind(c.original(t) for c in self._tape for _, t in c.inputs)
            wide = self._run_tape()
        if wide is None:
            return None, flush
        bad = [value[~finite(tensor)] for tensor, value in zip(call.out, wide, strict=True)]
        tops = [amax(value) for value in bad]
        return Wide(
            dtype="fp32",
            is_finite=all(math.isfinite(top) for top in tops),
            amax=max((top for top in tops if math.isfinite(top)), default=0.0),
            has_nan=any(math.isnan(top) for top in tops),
        ), flush

    def accepts(self, call: Call) -> bool:
        """Say whether an op that raised takes what it was given with the values that 16 bit made 0 of. Syncs: yes."""
        wide = self._wide.known(call) if self.behind(call.originals) else {}
        return bool(wide) and rerun_wide(call, torch.float32, call.given_with(wide)) is not None

    def _decisive(self, call: Call) -> Flush | None:
        """Return the zero without which the op would not have failed; of one operand alone, where several hold some."""
        found = self._flushes.read_by(call)
        for tensor, flush in found if len(found) > 1 else ():
            value = self._wide.get(call.original(tensor))
            if value is not None and is_repaired(call, run_in_fp32(call, {id(tensor): value})):
                return flush
        return found[0][1] if found else None

    def _run_tape(self) -> list[Tensor] | None:
        """Run the ops of one autograd node again on fp32 values of the forward, and 1 for what came in bad; None where none of them has any."""
        values, is_known, wide = WideValues(), False, None
        for call in self._tape:
            known = values.known(call)
            forward = {k: v for k, v in self._wide.known(call).items() if k not in known}
            is_known = is_known or bool(forward)
            bad = {id(t): sanitised(t) for _, t in call.inputs if not is_finite(t)}
            wide = run_in_fp32(call, {**bad, **forward, **known})
            if wide is None:
                return None
            values.put_results(call, wide)
        return wide if is_known else None


class Fp64Reference:
    """Follows overflowed tensors in fp64, so that an infinity that disappears again can be judged, and what it left where one was.

    `tanh(inf)` is 1, which is what fp32 gives: no fault. `rsqrt(inf)` is 0, which erases the activation without a
    trace of inf or NaN. The finite elements beside it are followed as they are: what they lost is rounding.
    """

    def __init__(self) -> None:
        self._true = WideValues()

    def start(self, call: Call) -> None:
        """Start to follow the results of an op that overflowed."""
        true = rerun_wide(call, call.wide_dtype)
        if true is not None and all(is_finite(t) for t in true):
            self._follow(call, true, [~finite(t) for t in call.out])

    def _follow(self, call: Call, true: list[Tensor], off: list[Tensor]) -> None:
        for tensor, value, is_off in zip(call.out, true, off, strict=True):
            if bool(is_off.any()) or self.follows(tensor):
                self._true.put(tensor, torch.where(is_off, widened(value), widened(tensor)))

    def follows(self, tensor: Tensor) -> bool:
        """Say whether a tensor is, or was made of, what overflowed. Syncs: no."""
        return self._true.get(tensor) is not None

    def is_too_large(self, call: Call) -> bool:
        """Say whether a product reads values that its 16-bit format does not hold, and fp32 would bring it. Syncs: yes."""
        known = self._true.known(call) if is_product(call.func) else {}
        return any(
            t.dtype in LOW_DTYPES and format_of(t.dtype).max < amax(known[id(t)]) < math.inf
            for _, t in call.inputs
            if id(t) in known
        )

    def carry(self, call: Call) -> str:
        """Follow one op.

        Returns what a finite result is and should have been, where an infinity was absorbed wrongly and it counts in the tensor; else nothing. Syncs: yes.
        """
        known = self._true.known(call)
        true = rerun_wide(call, call.wide_dtype, call.given_with(known)) if known else None
        if true is None or [t.shape for t in true] != [t.shape for t in call.out]:
            self._follow(call, call.out, [torch.zeros_like(t, dtype=torch.bool) for t in call.out])  # written anew
            return ""
        wide = rerun_wide(call, call.wide_dtype) or call.out  # on the infinity, so that rounding alone is no harm
        lost = [_lost(t, v, x) for t, v, x in zip(call.out, true, wide, strict=True)]
        told = next((w for t, v, x in zip(call.out, true, lost, strict=True) if (w := _difference(t, v, x))), "")
        self._follow(call, true, [~finite(t) if told else ~finite(t) | x for t, x in zip(call.out, lost, strict=True)])
        return told


def _lost(got: Tensor, true: Tensor, wide: Tensor) -> Tensor:
    """Return which finite elements are more than half of the true value away from it, as they are in the wider format too. Syncs: no."""
    half = true.abs() / 2
    is_off = got.isfinite() & true.isfinite() & ((widened(got) - widened(true)).abs() > half)
    return is_off & ~((widened(wide) - widened(true)).abs() <= half)


def _difference(got: Tensor, true: Tensor, lost: Tensor) -> str:
    """Describe the first of the elements that an overflow left wrong, if in the norm of all they count. Syncs: yes."""
    gap = (widened(got) - widened(true))[lost]
    counts = bool(lost.any()) and amax(gap) > format_of(got.dtype).smallest
    is_felt = counts and length(gap) > _FELT * length(true[true.isfinite()])
    return f"{float(got[lost][0]):.3g} instead of {float(true[lost][0]):.3g}" if is_felt else ""
