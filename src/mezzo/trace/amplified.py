"""Ops that make rounding large, on the way to a loss or a layer, and ids that it turns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..formats import LOW_DTYPES, dtype_name
from .measure import amax, ids_in, is_finite, mean_row, rerun, share_off, whole_results
from .ops import FACTORIZATIONS, SPECTRA, Call, is_product, plain
from .records import Lint, LintCase, Site
from .reference_path import ReferencePath
from .verdict import number
from .wide_values import StorageNotes, WideValues, forget_results, run_in_fp32

_LINEAR = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "to", "clone", "copy", "cat", "stack", "index", "gather", "index_select", "where",
    "masked_fill", "clamp", "clamp_min", "clamp_max", "relu", "abs", "max", "min", "amax", "amin", "maximum", "minimum",
})  # fmt: skip
"""Ops whose gradient does not depend on the values they are given, but for their signs and order."""
_TURNS = frozenset({"abs", "relu", "maximum", "minimum"})
"""Those whose gradient has another sign where an argument has."""
_MOVES = frozenset("index gather index_select take masked_select clone copy to embedding neg mul div".split())
"""Ops that make no error of what they are given alone, but may show one: they move it, or scale it by a number."""
_LOGARITHMS = frozenset({"log", "log2", "log10", "log1p"})
"""Ops whose gradient is right where their argument is."""
_SHARED = frozenset("logsumexp add sub to copy clone cat stack index gather index_select where".split())
"""Ops through which the gradient of a logsumexp goes back whole."""
_EQUALS = frozenset({"eq", "ne", "equal", "unique2", "unique_dim", "unique_consecutive"})
_COMPARES = _EQUALS | {"lt", "le", "gt", "ge"}
_PICKS = (
    _COMPARES
    | FACTORIZATIONS
    | {"topk", "argmax", "argmin", "max", "min", "kthvalue", "median", "bucketize", "searchsorted", "to"}
)
"""Ops that give whole numbers which others read as ids, or answers; the order of a sort is another with each rounding, and means the same."""
_TURNED = 1 / 2
"""How far what ids pick must lie from what those of fp32 pick."""
_WRONG, _SEEN, _ROUNDED = 1 / 4, 1 / 8, 2.0**-10
"""How far from fp32 a result must lie where rounding was made large, what comes of it, and what a target meets."""


@dataclass(frozen=True, slots=True)
class _Error:
    """How far a value lies from that of an fp32 run.

    Attributes:
        off: norm of the difference over that of the value in fp32.
        lint: the op that made rounding large; None where none did.
        is_used: whether a gradient depends on what is wrong.
        maker: the op that made the value, or what was wrong in it before.
        is_tracked: whether a gradient goes back through the op that made it, and so no data.
        close: the layer whose rows lie closer together than 16-bit numbers, if it comes from one.
    """

    off: float
    maker: Site
    close: str
    lint: Lint | None = None
    is_used: bool = False
    is_tracked: bool = False


class Amplified:
    """Finds ops that make rounding large (differences of nearly equal numbers, phases, long products) on the way to a loss or a layer.

    An op is named if its result is right once it runs in fp32 with all ops since the last layer or input, as is done beside the run. A layer is a product with
    a weight: what it rounds is not counted, unless its rows lie closer together than 16-bit numbers.
    """

    def __init__(self, reference: ReferencePath) -> None:
        self._reference = reference
        # by line and kernel, with the steps that felt it
        self._found: dict[tuple[str, str], tuple[Lint, set[int]]] = {}
        self._steps: set[int] = set()
        self._errors: StorageNotes[_Error] = StorageNotes()
        self.local = WideValues()  # of all since the last layers, had it run in fp32
        self._behind_close = WideValues()  # and of a layer whose results lie close together, as they are
        self._weights: StorageNotes[bool] = StorageNotes()
        self._shares = WideValues()  # by how much the gradient that comes back through logsumexps is off

    def model(self, model: nn.Module) -> None:
        """Take note of the weights of a model that is about to run. Syncs: no."""
        for weight in model.parameters():
            if (values := plain(weight)) is not None:
                self._weights.note(values, True)

    def is_weight(self, tensor: Tensor) -> bool:
        """Say whether memory is that of a model's weight, or of a cast of one. Host only."""
        return self._weights.get(tensor) is not None

    def see(self, call: Call, site: Site, wide: list[Tensor] | None) -> None:
        """Take in one op and its results in an fp32 run. Syncs: where they are known."""
        if wide is None or site.phase != "forward" or call.facts.name in SPECTRA:
            forget_results(call, self._errors, self.local, self._behind_close)
            return
        given = self._errors.read_by(call)
        read, wrong = next(((t, e) for t, e in given if e.lint), (None, None))
        has_weight = any(self._weights.get(t) for _, t in call.inputs)
        is_layer = has_weight and is_product(call.func)
        if has_weight and call.facts.name == "to":
            self._weights.note(call.out[0], True)
        offs = [share_off(tensor, value) for tensor, value in zip(call.out, wide, strict=True)]
        for tensor, error in given:
            if error.lint and (is_layer or _is_data(call, tensor, error, max(offs, default=0.0))):
                self.tell(error.lint, site.step)
        lasts = wrong is not None and wrong.is_used and read is not None and self._carries(call, read)
        close, known = next((e.close for _, e in given if e.close), ""), self.local.known(call)
        cut = run_in_fp32(call, known | self._behind_close.known(call)) if close and not is_layer else None
        is_excused = is_layer and not (call.out and _are_too_close(call.out[0], wide[0]))
        if is_layer:
            close = "" if is_excused else f"{site.op} (module {site.path})"
        local = None if is_excused else run_in_fp32(call, known)
        maker = wrong.lint.site if wrong and wrong.lint else self._maker(call, site, is_wrong=False)
        for tensor, off, value, alone, behind in zip(call.out, offs, wide, local or wide, cut or call.out, strict=True):
            kept, is_used = alone, False
            right, lint = min(_WRONG, off / 4), None
            if local is None:
                self.local.forget(tensor)
            elif wrong is not None and (off > _SEEN or lasts):
                lint = wrong.lint
                is_used = wrong.is_used or call.facts.name in _TURNS or not _is_linear(call, read)
            elif off > _WRONG and share_off(alone, value) < right:
                if any(not is_finite(t) and is_finite(known.get(id(t), t)) for _, t in call.inputs):
                    kept = tensor.detach().float()  # what an overflow leaves is no rounding
                else:
                    layer = close if share_off(behind, value) >= right else ""
                    lint = Lint(
                        rule="amplified-rounding", site=self._maker(call, site), kernel=call.facts.kernel,
                        dtype=dtype_name(self._reference.low), what=layer, value=off, case="close-results" if layer else "",
                    )  # fmt: skip
                    is_used = not _is_linear(call, None) and call.facts.name not in _LOGARITHMS
            if local is not None:
                self.local.put(tensor, kept)
            self._errors.note(tensor, _Error(off, maker, close, lint, is_used, call.is_tracked))
        self._behind_close.put_results(call, [t.detach().float() for t in cut or call.out] if close else None)

    def slope(self, call: Call, site: Site) -> None:
        """Look at ops whose gradient is wrong where rounding leaves the result right: logsumexp, a cross entropy of probabilities. Syncs: there."""
        found: tuple[float, str, LintCase] | None = None
        name = call.facts.name if call.is_tracked else ""
        shares = self._shared(call) if name in _SHARED else None
        self._shares.put_results(call, shares)
        if name == "logsumexp" and shares and call.out[0].dtype in LOW_DTYPES:
            off = share_off(1 + shares[0], torch.ones_like(shares[0]))
            found = (off, number(amax(call.out[0])), "weights") if off > _SEEN else None
        elif name == "binary_cross_entropy":
            wide = self._reference.get(call.originals[0])
            lost = 0.0 if wide is None else _without_slope(call, wide)
            found = (lost, "", "probabilities") if lost else None
        if found is not None:
            value, what, case = found
            lint = Lint(
                rule="amplified-rounding", site=site, kernel=call.facts.kernel,
                dtype=dtype_name(self._reference.low), what=what, value=value, case=case,
            )  # fmt: skip
            self.tell(lint, site.step)

    def _shared(self, call: Call) -> list[Tensor] | None:
        """Return by how much the gradients are off that come back through results: a logsumexp shares them out by e^(x - result) of its result as it was rounded. Syncs: no."""
        known = self._shares.known(call)
        if call.facts.name != "logsumexp":
            return run_in_fp32(call, {id(t): torch.zeros_like(t) for _, t in call.inputs} | known) if known else None
        wide = run_in_fp32(call, {id(t): t.detach().float() + known[id(t)].log1p() for _, t in call.inputs if known})
        return wide and [(wide[0] - call.out[0].detach().float()).expm1().nan_to_num(0.0, 0.0, 0.0)]

    def _maker(self, call: Call, site: Site, *, is_wrong: bool = True) -> Site:
        """Return where what is wrong in a result was made: before, if the op only moves it, or reads it as wrong as that. Syncs: if it is wrong."""
        is_moved = call.facts.name in _MOVES and len(call.inputs) == 1
        for tensor, error in self._errors.read_by(call):
            right = self.local.get(call.original(tensor)) if is_wrong else None
            if is_moved or (right is not None and share_off(tensor, right) > _WRONG):
                return error.maker
        return site

    def _carries(self, call: Call, read: Tensor) -> bool:
        """Say whether a wrong tensor still counts in what it is reduced or added to: a mean or sum, or a loss of which it is no small part. Syncs: there."""
        if call.facts.name in ("mean", "sum"):
            right = self.local.get(call.original(read))
            return right is not None and share_off(read, right) > _SEEN
        is_term = call.facts.name in ("add", "sub") and amax(read) > _SEEN * amax(call.out[0])
        return read.numel() == 1 and (len(call.inputs) == 1 or is_term)

    def loss(self, loss: Tensor, step: int, of_risks: bool) -> None:
        """Take note of what backward starts from, and whether a wrong value counts where its gradient is right. Syncs: yes."""
        value = plain(loss)
        if value is None or is_finite(value):  # what is felt behind others is no rounding
            self._steps.add(step)
        error = None if value is None else self._errors.get(value)
        if error and error.lint and (error.is_used or (of_risks and error.lint.site.op in _LOGARITHMS)):
            self.tell(error.lint, step)

    def lasting(self) -> list[Lint]:
        """Return what came in half of the steps or more: what is left where a loss is met is rounding. Host only."""
        found = [lint for lint, steps in self._found.values() if 2 * len(steps) >= len(self._steps)]
        return sorted(found, key=lambda x: -x.value)

    def end_step(self) -> None:
        """Let go of what is no more; what was made before the loop is still what it was. Host only."""
        for notes in (self.local.notes, self._behind_close.notes, self._errors):
            notes.drop_gone()

    def expect(self, tensor: Tensor, lint: Lint) -> None:
        """Follow data that ids which rounding turned have picked, to where a gradient feels it. Host only."""
        self._errors.note(tensor, _Error(1.0, lint.site, "", lint, is_used=True))

    def tell(self, lint: Lint, *steps: int) -> None:
        """Take note of what a gradient felt in some steps. Host only."""
        key = str(lint.site.frame), lint.kernel
        first, felt = self._found.get(key, (lint, set()))
        is_larger = (lint.case, lint.site.step) == (first.case, first.site.step) and lint.value > first.value
        self._found[key] = lint if is_larger else first, felt.union(steps)


class RoundedIndices:
    """Follows ids and answers that were computed from 16-bit numbers to what they pick: whether fp32 has others, and a gradient or the host feels it."""

    def __init__(self, amplified: Amplified, reference: ReferencePath) -> None:
        self._amplified, self._reference = amplified, reference
        self._picked, self._picked_by = WideValues(), StorageNotes[Lint]()

    def see(self, call: Call, site: Site) -> None:
        """Take in one op of a forward. Syncs: where it makes or reads such ids."""
        found = ids_in(call.returned)
        picked = self._of_fp32(call)
        if picked and call.out:
            self._feel(call, site, picked)
        known = {id(t): v for _, t in call.inputs if (v := self._reference.get(t)) is not None}
        for ids in found if call.facts.writes else ():
            self._picked.forget(ids)
        if not found or not (picked or (known and call.facts.name in _PICKS)):
            return
        near = self._amplified.local.known(call)
        wide, alone = whole_results(call, known | picked), whole_results(call, near | picked)
        lint = self._behind(call) if picked else None
        for ids, others, nearby in zip(found, wide, alone, strict=False):
            if not ids.numel() or not ids.shape == others.shape == nearby.shape:
                continue
            value, alike = _in_places_of(call, ids, others), _in_places_of(call, ids, nearby)
            turned, left = (float((x != value).float().mean()) for x in (ids, alike))
            if lint is None and turned and (left <= turned / 4 or _is_answered_by_rounding(call, known)):
                lint = Lint(
                    rule="rounded-index", site=site, kernel=call.facts.kernel, dtype=dtype_name(self._reference.low),
                    what=f"{turned:.0%}", value=turned, case=_case_of(call.facts.name),
                )  # fmt: skip
            if lint is not None:
                self._picked.put(ids, value)
                self._picked_by.note(ids, lint)
                if call.facts.name == "equal":
                    self.read(ids, site)

    def read(self, answer: Tensor, site: Site) -> None:
        """Take note of an answer that the host goes by, where fp32 has the other. Syncs: where one is known."""
        value, lint = self._picked.get(answer), self._picked_by.get(answer)
        if value is not None and lint is not None and answer.dtype is torch.bool and bool(value != answer):
            self._amplified.tell(lint, site.step)

    def refused(self, call: Call, site: Site) -> None:
        """Take note of an op that raised for ids that rounding turned, and takes those of fp32. Syncs: as the op does."""
        picked = self._of_fp32(call)
        if picked and self._picking(call, picked) is not None:
            self._amplified.tell(self._behind(call), *range(site.step + 1))

    def _feel(self, call: Call, site: Site, picked: dict[int, Tensor]) -> None:
        """Compare what ids pick, less what all of a table has in common, with what those of fp32 do: is it felt, where a gradient is, or behind? Syncs: there."""
        for tensor, value in zip(call.out, self._picking(call, picked) or [], strict=False):
            mean = mean_row(call.inputs[0][1] if call.inputs else value, value)
            is_other = 2 * tensor.numel() < value.numel() or 2 * value.numel() < tensor.numel()
            if tensor.shape == value.shape:
                is_other = share_off(tensor.detach() - mean, value.float() - mean) > _TURNED
            if is_other:
                if call.is_tracked:
                    self._amplified.tell(self._behind(call), site.step)
                else:
                    self._reference.begin(tensor, value.float(), site)
                    self._amplified.expect(tensor, self._behind(call))

    def _of_fp32(self, call: Call) -> dict[int, Tensor]:
        return {id(t): ids for t in ids_in(call.given) if (ids := self._picked.get(t)) is not None}

    def _behind(self, call: Call) -> Lint:
        found = self._picked_by.first(ids_in(call.given))
        assert found is not None  # where ids of fp32 are known
        return found

    def _picking(self, call: Call, picked: dict[int, Tensor]) -> list[Tensor] | None:
        """Run an op with the ids of fp32; None where they pick what is not there. Syncs: as the op does."""
        try:
            return rerun(call, call.given_with(picked))
        except (RuntimeError, NotImplementedError, IndexError):
            return None


def _are_too_close(tensor: Tensor, wide: Tensor) -> bool:
    """Say whether rounding to 16 bit moves rows by about as much as they differ from each other, as where all lie near 300. Syncs: where they are in 16 bit."""
    if tensor.dtype not in LOW_DTYPES or tensor.dim() < 2:
        return False
    rows = wide.reshape(-1, wide.shape[-1])
    return 0 < _WRONG * float((rows - rows.mean(0)).norm()) < float((wide.to(tensor.dtype) - wide).norm()) < math.inf


def _without_slope(call: Call, wide: Tensor) -> float:
    """Return the share of probabilities that 16 bit made 0 or 1 against their targets: a sigmoid passes them no gradient. Syncs: yes."""
    given, target = (t.detach().float() for _, t in call.inputs[:2])
    is_lost = ((given == 0) | (given == 1)) & (given != wide) & ((given - target).abs() > _TURNED)
    return float(is_lost.float().mean())


def _case_of(name: str) -> LintCase:
    return "factors" if name in FACTORIZATIONS else "answer" if name in _COMPARES else ""


def _is_answered_by_rounding(call: Call, known: dict[int, Tensor]) -> bool:
    """Say whether a question is of numbers that 16 bit made equal, or that lie nowhere near those of fp32. Syncs: yes."""
    name, asked = call.facts.name, [(t, known[id(t)]) for _, t in call.inputs if id(t) in known]
    return name in _EQUALS | FACTORIZATIONS or (name in _COMPARES and any(share_off(*pair) > _TURNED for pair in asked))


def _is_data(call: Call, read: Tensor, error: _Error, off: float) -> bool:
    """Say whether a wrong tensor without a gradient, as a target is, meets what has one, by more than rounding; what was detached, if the result is off too. Syncs: no."""
    is_fixed = read.dim() > 0 and not call.original(read).requires_grad
    return call.is_tracked and is_fixed and error.off > _WRONG and off > (_SEEN if error.is_tracked else _ROUNDED)


def _is_linear(call: Call, read: Tensor | None) -> bool:
    """Say whether no gradient of an op depends on one that it reads: of a product, those of the other factors do."""
    if call.facts.name in ("mul", "div"):
        is_divisor = call.facts.name == "div" and read is call.args[1]
        return not (is_divisor or any(call.original(t).requires_grad for _, t in call.inputs if t is not read))
    return call.facts.name in _LINEAR


def _in_places_of(call: Call, ids: Tensor, others: Tensor) -> Tensor:
    """Return other ids; of topk, those that are in both in the places that they have in `ids`: the order of equals means nothing. Syncs: yes."""
    if call.facts.name != "topk" or not ids.dim():
        return others
    dim, size = int(call.args[2]) if len(call.args) > 2 else -1, call.inputs[0][1].numel()
    mine, new = (x.movedim(dim, -1) for x in (ids, others))
    row = torch.arange(mine[..., 0].numel(), device=ids.device).view(mine.shape[:-1])[..., None] * size
    is_kept, is_new = torch.isin(mine + row, new + row), ~torch.isin(new + row, mine + row)
    return mine.masked_scatter(~is_kept, new[is_new]).movedim(-1, dim)
