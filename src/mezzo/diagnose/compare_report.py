"""What a comparison with fp32 writes down, plain frozen data, and how it is laid out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..report import Block, Cell, Chart, Document, Heading, Note, Pairs, Report, Series, Table, thinned
from ..trace import Frame, Phase, short_line

WORTH_DB = 2.0
"""Gains below this come and go with the rounding of other ops: see decision 0066."""
GOOD_DB = 20.0
"""Gradients this near to fp32 point the same way to within a tenth of their length."""
_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How well values agree with fp32: signal-to-error ratios in dB, 6 dB to the bit.

    inf: no difference. -inf: not finite where fp32 is, or an error where fp32 has nothing but zeros.

    Attributes:
        local: what was added here: the same inputs, in fp32.
        inherited: what came in with the inputs: fp32 here, on these inputs and on those of an fp32 run.
        total: against a step that ran in fp32 from the start.
    """

    local: float
    inherited: float
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleError:
    """Errors of what one module's own ops made; its submodules' results are taken as they came.

    Attributes:
        module: name below the root, empty for the root itself or outside any module.
        path: as a reader calls it.
        forward: its results; None if none of them differs from fp32.
        backward: the gradients of its inputs, likewise.
        weights: the gradients of its parameters, likewise.
        local_share: local error over signal, energies, summed over the three.
    """

    module: str
    path: str
    cls: str
    forward: Agreement | None
    backward: Agreement | None
    weights: Agreement | None
    local_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OpError:
    """Errors of one op on one line of one module.

    Attributes:
        module, path, local_share: as in `ModuleError`.
        op: plain name; in backward, of the forward op whose gradient ran.
        frame: the nearest line of a library or of the user.
        calls: how many results were compared.
        flops: floating-point operations in 16 bit.
    """

    phase: Phase
    module: str
    path: str
    op: str
    called: str
    kernel: str
    dtype: str
    frame: Frame | None
    calls: int
    agreement: Agreement
    local_share: float
    flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientError:
    """Error of one parameter's gradient, in dB against an fp32 step, and its share of that of all, in energy; NaN if that is infinite or zero."""

    name: str
    total: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFidelity:
    """One step under one policy, beside fp32.

    Attributes:
        scale: loss scale of the backward pass.
        outputs: of the outermost module.
        gradients: of all parameters, as one vector; None without gradients.
        modules: in the order they first computed.
        flops: floating-point operations of the step, in any format.
        flushed: share of the gradients' error, in energy, that lies in elements that are 0 under the policy.
        unseen: (kernel, calls) of ops that have no fp32 counterpart; their results count as exact.
        flaw: why the step says nothing of its agreement, such as a loss that is NaN in fp32 too; empty if it does.
    """

    policy: str
    scale: float
    loss: float
    reference_loss: float
    outputs: Agreement
    gradients: Agreement | None
    modules: tuple[ModuleError, ...]
    ops: tuple[OpError, ...]
    parameters: tuple[GradientError, ...]
    flops: int
    flushed: float
    unseen: tuple[tuple[str, int], ...]
    flaw: str

    @property
    def low_flops(self) -> int:
        """Floating-point operations in 16 bit."""
        return sum(op.flops for op in self.ops)

    @property
    def figure(self) -> float:
        """The number to improve: total agreement of the gradients, else of the outputs, in dB."""
        return (self.gradients or self.outputs).total


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """An edit of the policy that was tried.

    Attributes:
        edit: text to append to the policy's, after a comma.
        gain: dB that the gradients (without gradients: the outputs) come nearer to fp32.
        gradients: their total agreement after the edit, dB; None without gradients.
        outputs: that of the outputs, dB.
        cost: share of the step's floating-point operations that the edit takes to fp32.
    """

    edit: str
    gain: float
    gradients: float | None
    outputs: float
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareReport(Report):
    """What a comparison with fp32 found.

    Attributes:
        measurement: the step under the policy, beside fp32.
        proposals: edits that were tried and pay, by what they gain for what they cost, the best first.
        tried: every edit that was tried by itself.
    """

    model: str
    measurement: StepFidelity
    proposals: tuple[Proposal, ...]
    tried: tuple[str, ...]

    @property
    def ranking(self) -> tuple[ModuleError, ...]:
        """Modules by the error they add themselves, the worst first."""
        return tuple(sorted(self.measurement.modules, key=lambda m: -m.local_share))

    @property
    def op_ranking(self) -> tuple[OpError, ...]:
        """Ops by the error they add themselves, the worst first."""
        return tuple(sorted(self.measurement.ops, key=lambda op: -op.local_share))

    def document(self) -> Document:
        """Return the layout."""
        m = self.measurement
        blocks: list[Block] = [_SCALE, _summary(m), *_proposals(self.proposals, len(self.tried))]
        blocks += [Heading(text="Modules by the error they add"), _modules(self.ranking)]
        blocks += [Heading(text="Ops by the error they add"), _ops(self.op_ranking)]
        if m.unseen:
            names = ", ".join(f"{kernel} ({calls})" for kernel, calls in m.unseen)
            blocks.append(Note(text=f"Without an fp32 counterpart, taken as exact: {names}."))
        return Document(
            title=f"mezzo compare of {self.model} under {m.policy} with fp32",
            verdict=self._verdict(),
            is_good=m.figure >= GOOD_DB and not m.flaw,
            blocks=tuple(blocks),
            details=tuple(_charts(m.modules)),
        )

    def _verdict(self) -> str:
        m = self.measurement
        if m.flaw:
            where = _TRACED if "not finite" in m.flaw else ""
            return f"Not enough seen: {m.flaw}, so nothing can be told of what the policy adds.{where}"
        what = "outputs" if m.gradients is None else "gradients"
        best = "no single rule brings them nearer"
        if self.proposals:
            best = f"best rule: {self.proposals[0].edit} ({_db(self.proposals[0].gain, sign=True)})"
        first = next((op for op in m.ops if op.agreement.local == -math.inf), None) if m.figure == -math.inf else None
        if first is not None:
            line = short_line(first.frame)
            return (
                f"The {what} hold inf or NaN under the policy, and not in fp32: the first comes from {first.op}, {first.phase}, "
                f"module {first.path}{line and f' at {line}'}; {best}."
            )
        off = 10 ** (-m.figure / 20)
        percent = f"{off:.2g}" if math.isinf(m.figure) else f"{100 * off:.3g} %"
        flushed = (
            f", most of it gradients that are 0 at loss scale {m.scale:g}"
            if m.figure < GOOD_DB and m.flushed > 1 / 2
            else ""
        )
        return f"The {what} agree with fp32 to {_db(m.figure)}, {percent} off{flushed}; {best}."


_TRACED = " Put one step in fp32 into `with mezzo.diagnose.trace(model) as t:` to have the op that makes the first one named in t.report."
_SCALE = Note(
    text="dB is how far the error lies below the values of fp32: 20 dB are 10 % of them, 40 dB 1 %, 60 dB 0.1 %, and 6 dB one bit. "
    "Local error is added at a place, inherited error came with its inputs, total error is both."
)


def _db(value: float | None, sign: bool = False) -> str:
    if value is None:
        return ""
    return "exact" if value == math.inf and not sign else f"{value:{'+' if sign else ''}.1f} dB"


def _summary(m: StepFidelity) -> Pairs:
    pairs = [
        ("loss", f"{m.loss:.6g}, in fp32 {m.reference_loss:.6g}"),
        ("outputs", _db(m.outputs.total)),
        ("gradients", "none" if m.gradients is None else _db(m.gradients.total)),
        ("loss scale", f"{m.scale:g}"),
    ]
    worst = max((p for p in m.parameters if p.share > 0), key=lambda p: p.share, default=None)
    if worst is not None:
        pairs.append(("most error in", f"gradient of {worst.name}: {worst.share:.0%} of it, {_db(worst.total)}"))
    return Pairs(pairs=tuple(pairs))


def _proposals(found: tuple[Proposal, ...], tried: int) -> list[Block]:
    if not found:
        return [Note(text=f"fp32 rules tried: {tried}; none gains {WORTH_DB:g} dB.")] if tried else []
    rows = tuple((p.edit, _db(p.gain, sign=True), _db(p.gradients), _db(p.outputs), f"{p.cost:.1%}") for p in found)
    columns = ("policy edit", "gain", "gradients", "outputs", "work to fp32")
    return [Table(title=f"Rules that pay, each measured by running it ({tried} tried)", columns=columns, rows=rows)]


def _three(a: Agreement | None) -> tuple[Cell, Cell, Cell]:
    return ("", "", "") if a is None else (_db(a.local), _db(a.inherited), _db(a.total))


def _modules(ranking: tuple[ModuleError, ...]) -> Table:
    shown = ranking[:_SHOWN]
    rows = tuple((m.path, m.cls, *_three(m.forward), _three(m.backward)[0], _three(m.weights)[0]) for m in shown)
    columns = ("module", "class", "local", "inherited", "total", "backward local", "weight gradient local")
    return Table(title="", columns=columns, rows=rows)


def _ops(ranking: tuple[OpError, ...]) -> Table:
    shown = ranking[:_SHOWN]
    rows = tuple((o.op, o.phase, o.dtype, o.path, short_line(o.frame), *_three(o.agreement)) for o in shown)
    columns = ("op", "phase", "type", "module", "line", "local", "inherited", "total")
    return Table(title="", columns=columns, rows=rows)


def _charts(modules: tuple[ModuleError, ...]) -> list[Block]:
    charts: list[Block] = []
    for title, found in (
        ("Results, in the order they were computed", [(m.path, m.forward) for m in modules]),
        ("Gradients of inputs, from the first module to the last", [(m.path, m.backward) for m in modules]),
    ):
        shown, points = thinned(title, [(path, a) for path, a in found if a is not None])
        if points:
            names = ("local", "inherited", "total")
            series = tuple(Series(name=name, values=tuple(getattr(a, name) for _, a in points)) for name in names)
            labels = tuple(path for path, _ in points)
            charts.append(Chart(title=shown, kind="lines", labels=labels, series=series, unit="dB"))
    return charts
