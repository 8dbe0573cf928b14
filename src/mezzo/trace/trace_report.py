"""How the findings of a trace are laid out."""

from __future__ import annotations

import linecache
import math
import textwrap
from dataclasses import dataclass
from typing import Literal

from ..errors import listed, plural
from ..report import Block, Chart, Document, Heading, Note, Pairs, Report, Series, Source, Table, thinned
from .evidence import is_metric
from .findings import FAULTY_RULES, Finding
from .frames import line_pairs, short_line, source_line
from .lint_warning import explain_lint
from .records import Frame, LineRange, Lint, Size, TensorFacts, TraceRecord

Answer = Literal["faulty", "healthy", "not enough seen"]
_SHOWN = 5
_TOO_HIGH = " The loss scale was too high for a step, as happens while a scaler finds its level."
_MARGIN = 4
_LINES = 64
_SHOWN_ZEROS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceReport(Report):
    """What a trace saw, `record`, and what it found in it: `findings`, the first fault first."""

    record: TraceRecord
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are not the ordinary work of a loss scaler."""
        return tuple(f for f in self.findings if f.is_fault)

    @property
    def answer(self) -> Answer:
        """Whether the program is faulty, healthy, or was not seen well enough to say so."""
        return "faulty" if self.faults else "not enough seen" if self.unseen else "healthy"

    @property
    def is_healthy(self) -> bool:
        """Whether there is no fault, and enough was seen to say so."""
        return self.answer == "healthy"

    @property
    def unseen(self) -> str:
        """What keeps a report without a fault from saying that the program is healthy; empty if nothing does."""
        r = self.record
        if not r.ops:
            return "no op of torch ran in this process"
        if r.ended:
            return f"the program ended by itself with {r.ended}"
        if outside := _outside(r):
            return outside
        if not r.backwards and (r.forwards or not r.inferences):
            return "nothing went backward"
        left_out = r.skipped or len({step for f in self.findings if not f.is_fault for step in f.steps})
        if left_out and not r.updates:
            return f"the loss scaler left out every step ({left_out})"
        is_empty = r.sizes and not any(s.amax or s.nonfinite for s in r.sizes)
        return "every output and gradient was 0 or empty" if is_empty else ""

    @property
    def seen(self) -> str:
        """What was looked at, in a sentence."""
        r = self.record
        counts = [
            _count(r.forwards + r.inferences, "forward"), _count(r.backwards, "backward"), _count(r.updates, "update"),
            *([_count(r.skipped, "step") + " left out by the loss scaler"] if r.skipped else []),
        ]  # fmt: skip
        return f"{', '.join(counts)}; {r.ops:,} ops"

    def document(self) -> Document:
        """Return the layout."""
        r = self.record
        title = f"mezzo trace of {r.model or 'a program'}: {_count(r.steps - r.first, 'step')}, {r.ops:,} ops, rank {r.rank}"
        blocks: list[Block] = []
        for finding in self.findings[:1]:
            blocks += _finding(finding)
        blocks += _others(self.findings[1:])
        blocks += _warnings([x for x in r.lints if x.rule not in FAULTY_RULES])
        blocks += _unreached(r)
        step = self.findings[0].step if self.findings else min((s.step for s in r.sizes), default=0)
        details: list[Block] = [_tensors(f) for f in self.findings[:1] if f.inputs or f.outputs]
        details += _charts(r.sizes, step)
        details += _annotated(r.lines, self.findings)
        return Document(
            title=title, verdict=self._verdict(), is_good=self.is_healthy, blocks=tuple(blocks), details=tuple(details)
        )

    def _verdict(self) -> str:
        if self.answer == "not enough seen":
            return f"Not enough seen: {self.unseen}. Looked at: {self.seen}."
        if self.answer == "healthy":
            scale = _TOO_HIGH if self.findings else ""
            broken = listed(tuple(dict.fromkeys(x.rule for x in self.record.lints)))
            word = f"No fault, but the code loses numbers ({broken})" if broken else "Healthy"
            metrics = [e.site for e in self.record.events if e.kind == "source" and is_metric(e)]
            lines = listed(tuple(dict.fromkeys(f"{site.op} at {site.frame}" for site in metrics)))
            apart = f", but for metrics that have no value ({lines})" if metrics else ""
            return f"{word}: no inf or NaN reached a loss, gradient, weight, buffer, output or the host in {self.seen}{apart}.{scale}"
        first = self.faults[0]
        return f"Faulty: {first.verdict} in {first.op}, {first.phase}, module {first.path}{f' at {first.frame}' if first.frame else ''}."


def _outside(r: TraceRecord) -> str:
    """Say what happened where the trace does not look; empty if nothing did."""
    if r.elsewhere:
        threads = f"{plural('thread', len(r.elsewhere))} {listed(r.elsewhere)}"
        return f"modules were trained in the {threads}, whose ops were not seen: write `with mezzo.diagnose.trace(model)` there"
    unknown = next((s for s in r.sinks if not s.causes), None)
    return f"inf or NaN reached {unknown.kind} {unknown.name} from where no op was seen" if unknown is not None else ""


def _count(n: int, what: str) -> str:
    return f"{n:,} {plural(what, n)}"


def _finding(f: Finding) -> list[Block]:
    times = f", in {len(f.steps)} steps" if len(f.steps) > 1 else ""
    pairs = [("why", f.why), *line_pairs(f.frame, f.library)]
    if f.kernel:
        called = f", called as {f.called}" if f.called and f.called != f.op else ""
        pairs.append(("op", f"{f.op}{called} (ran {f.kernel})"))
    if f.flush is not None and f.flush.site.frame is not None:
        pairs.append(("zero from", f"{f.flush.site.frame}   {source_line(f.flush.site.frame)}"))
    if f.reached:
        pairs.append(("reached", listed(f.reached)))
    if f.fix.edit:
        pairs.append(("policy edit", f.fix.edit))
    pairs.append(("fix" if f.fix.tried else "idea", f.fix.advice))
    if f.fix.tried:
        pairs.append(("tried", f"{f.fix.tried}."))
    heading = Heading(
        text=f"{f.verdict}: {f.op}, {f.phase}, module {f.path}, step {f.step}{times}",
        tone="bad" if f.is_fault else "plain",
    )
    return [heading, Pairs(pairs=tuple(pairs))]


def _others(findings: tuple[Finding, ...]) -> list[Block]:
    """List the faults after the first; most of them are its consequences."""
    if not findings:
        return []
    rows = tuple((f.verdict, f.op, f.phase, f.path, short_line(f.frame), f.fix.edit) for f in findings[:_SHOWN])
    table = Table(title="After it", columns=("verdict", "op", "phase", "module", "line", "policy edit"), rows=rows)
    rest = len(findings) - _SHOWN
    return [table, Note(text=f"… and {rest} more, in the JSON form.")] if rest > 0 else [table]


def _warnings(lints: list[Lint]) -> list[Block]:
    # one line of a program runs in many modules
    told = ((x, explain_lint(x)) for x in lints)
    rows = dict.fromkeys((x.rule, short_line(x.site.frame), f"{y.why} Instead: {y.advice}") for x, y in told)
    table = Table(title="", columns=("rule", "line", "why"), rows=tuple(rows)[:_SHOWN])
    return [Heading(text="Lint rules broken"), table] if rows else []


def _unreached(r: TraceRecord) -> list[Block]:
    """Name the parameters that no gradient reached, by the line that detached what they computed; many are meant to have none."""
    lines: dict[Frame | None, list[str]] = {}
    for name, frame in r.unreached if r.backwards else ():
        lines.setdefault(frame, []).append(name)
    where = {frame: f": detached at {frame}   {source_line(frame)}" if frame else "" for frame in lines}
    pairs = tuple(("no gradient", f"{listed(names)}{where[frame]}") for frame, names in lines.items())
    return [Pairs(pairs=pairs)] if pairs else []


def _tensors(f: Finding) -> Table:
    tensors: list[tuple[str, TensorFacts]] = [*(("in", t) for t in f.inputs), *(("out", t) for t in f.outputs)]
    return Table(
        title=f"Inputs and outputs of {f.op}",
        columns=("", "tensor", "type", "largest finite", "NaN", "inf", "-inf", "zeros"),
        rows=tuple((way, t.name, str(t), t.amax, t.nan, t.posinf, t.neginf, t.zeros) for way, t in tensors[:12]),
    )


def _log2(x: float) -> float:
    return math.log2(x) if x > 0 else math.nan


def _charts(sizes: tuple[Size, ...], step: int) -> list[Block]:
    charts: list[Block] = []
    for title, kind, order in (
        ("Module outputs, in the order they were computed", "output", 1),
        ("Parameter gradients, from the first layer to the last", "gradient", -1),
    ):
        shown, found = thinned(title, [s for s in sizes if (s.step, s.kind, s.call) == (step, kind, 0)][::order])
        if any(math.isfinite(_log2(s.amax)) for s in found):
            charts.append(
                Chart(
                    title=shown,
                    kind="lines",
                    labels=tuple(s.name or s.root for s in found),
                    series=(
                        Series(name="root mean square", values=tuple(_log2(s.rms) for s in found)),
                        Series(name="largest magnitude", values=tuple(_log2(s.amax) for s in found)),
                    ),
                    unit="log2",
                )
            )
    return charts


def _span(r: LineRange) -> str:
    """Write a range: its ends, and between which exponents most values lie.

    >>> r = LineRange(file="f", line=1, phase="forward", dtypes=("fp16",), lowest=-9, highest=3, middle=(-4, 1),
    ...               zeros=0.5, ops=("relu",))
    >>> _span(r)
    'fwd fp16 2^-9…2^3, most 2^-4…2^1, 50% 0'
    """
    phase = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}[r.phase]
    parts = [f"{phase} {'/'.join(r.dtypes)} {_ends(r.lowest, r.highest)}"]
    if r.middle is not None and r.middle != (r.lowest, r.highest):
        parts.append(f"most {_ends(*r.middle)}")
    if r.highest is not None and r.zeros >= _SHOWN_ZEROS:
        parts.append(f"{r.zeros:.0%} 0")
    return ", ".join(parts)


def _ends(low: int | None, high: int | None) -> str:
    if low is None or high is None:
        return "0"
    return f"2^{high}" if low == high else f"2^{low}…2^{high}"


def _annotated(lines: tuple[LineRange, ...], findings: tuple[Finding, ...]) -> list[Block]:
    """Print the user's own code, with the exponent range of what each line computed beside it."""
    faults = [f.frame for f in findings if f.frame is not None]
    files = dict.fromkeys([f.file for f in faults] or [r.file for r in lines])
    blocks: list[Block] = []
    for file in list(files)[:2]:
        notes: dict[int, list[str]] = {}
        for r in lines:
            if r.file == file and r.dtypes:
                notes.setdefault(r.line, []).append(_span(r))
        shown = _window(file, notes, faults)
        if shown:
            blocks += [
                Heading(text="Magnitudes by line: smallest…largest, and where nine in ten lie"),
                Source(file=file, lines=tuple(shown)),
            ]
    return blocks


def _window(file: str, notes: dict[int, list[str]], faults: list[Frame]) -> list[tuple[int, str, str, bool]]:
    marked = {f.line for f in faults if f.file == file}
    centres = marked or set(notes)
    wanted = {n for c in centres for n in range(c - _MARGIN, c + _MARGIN + 1)} if marked else centres
    numbers = [n for n in sorted(wanted) if n > 0][:_LINES]
    texts = textwrap.dedent("".join(linecache.getline(file, n).rstrip() + "\n" for n in numbers)).split("\n")
    return [
        (n, text, "\n".join(notes.get(n, ())), n in marked)
        for n, text in zip(numbers, texts, strict=False)
        if text or n in notes
    ]
