"""What a watch saw, and how it is laid out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from ..errors import listed, plural
from ..formats import FORMATS
from ..report import Band, Block, Chart, Document, Heading, Heat, Note, Pairs, Report, Series, Table, thinned
from ..trace import BIAS, BINS, Histogram, largest_scale, number

Kind = Literal["activation", "gradient", "weight"]
KINDS: tuple[Kind, ...] = ("activation", "gradient", "weight")
SHOWN = ("fp16", "bf16", "e4m3", "e5m2")
"""Formats whose ranges are held against every histogram."""
_WARN_SHARE = 0.05
_WARN_HEADROOM = 1.0
_LOST_SHARE = 0.5
_SKIPS, _SKIPPED_SHARE, _HALVINGS = 3, 0.05, 16
"""A scaler that looks for its level skips a few steps, up to 16 at the beginning; more, and more than this share of all, is trouble."""
_LEAST_DEAD, _LEAST_STILL = 8, 3
"""Sampled steps that show that a weight gets nothing, and that a rate of 0 is no beginning of a warm-up."""
_ZERO_SHARE, _NEAR_END = 0.3, 2
_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        scale: loss scale its gradients carried.
        grad_norm: of the true gradients.
        loss: sum of the losses given to `backward`; with a closure, the last one; None if there was none.
        reason: what was not finite; empty if it was taken.
        names: some parameters whose gradients were not finite.
    """

    step: int
    applied: bool
    scale: float
    grad_norm: float
    loss: float | None
    reason: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """Exponents of one tensor over the sampled steps.

    Attributes:
        kind: activation (output of a leaf module), gradient (as carried, times the loss scale) or weight.
        lost: share of sampled weights with a gradient that a taken step moved as little as its master.
    """

    kind: Kind
    name: str
    histogram: Histogram
    lost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchReport(Report):
    """A run as its watch saw it.

    Attributes:
        policy: text; empty for a model that is not prepared.
        compute: short name of the format low ops run in.
        every: sampled one step in so many.
        steps: every step of a prepared run; none of another.
        loss_scale: of the last step; 1 where it is not known.
        host_share: share of the host's time that watching took, as measured in this run.
        sampled: sampled steps that were taken.
        idle: those of them that moved no sampled weight, nor master, although there were gradients.
        zero: those of them in which every sampled gradient was 0.
        cleared: those of them in which they were 0 before the optimizer took them, and not after backward.
        still: further sampled steps, which were taken at a learning rate of 0.
        dead: weights whose every sampled gradient was 0.
        unreached: parameters that had no gradient in any sampled step.
        states: 16-bit buffers that the run wrote, whose updates a watch does not look at.
        masters: policy that keeps what 16-bit weights without a master lose; empty where all have one.
    """

    model: str
    policy: str
    compute: str
    every: int
    num_steps: int
    steps: tuple[StepRecord, ...]
    tensors: tuple[TensorRecord, ...]
    loss_scale: float
    host_share: float
    sampled: int = 0
    idle: int = 0
    zero: int = 0
    cleared: int = 0
    still: int = 0
    dead: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    masters: str = ""

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped."""
        return sum(not s.applied for s in self.steps)

    def total(self, kind: Kind) -> Histogram:
        """Return the histogram of all tensors of a kind."""
        empty = Histogram(counts=(0,) * BINS)
        return reduce(Histogram.__add__, (t.histogram for t in self.tensors if t.kind == kind), empty)

    @property
    def ends(self) -> tuple[int, int] | None:
        """The smallest and the largest exponent of anything that was seen; None if there were no numbers."""
        found = [e for kind in KINDS for e in (self.total(kind).lowest, self.total(kind).highest) if e is not None]
        return (min(found), max(found)) if found else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is about to be lost or is, in sentences."""
        fmt = FORMATS[self.compute]
        texts = list(self._step_warnings())
        # a loss scaler leaves out the steps whose gradients are not finite
        spans, rest = divmod(self.num_steps, self.every)
        is_all_taken = self.sampled == spans + (rest > spans % self.every)
        for t in self.tensors:
            h = t.histogram
            seen = h.zeros + h.numbers + h.nonfinite
            if t.kind == "activation" and h.headroom(fmt) < _WARN_HEADROOM:
                texts.append(f"output of {t.name}: less than one binade below the largest {self.compute} number.")
            if h.nonfinite and (t.kind != "gradient" or is_all_taken):
                texts.append(f"{t.kind} {t.name}: {h.nonfinite} of {seen} sampled values are inf or NaN.")
            if t.kind == "gradient" and (flushed := h.flushed(fmt)) > _WARN_SHARE:
                share = f"{flushed:.0%} of the numbers"
                texts.append(f"gradient {t.name}: {share} are 0 in {self.compute} at this loss scale.")
            if t.kind == "gradient" and _underflows(h, self.compute):
                texts.append(
                    f"gradient {t.name}: underflow: {h.zeros / seen:.0%} are 0 and the others reach down to 2^{h.lowest}, the end of "
                    f"{self.compute}; {'raise the loss scale' if self.loss_scale > 1 else 'scale the loss up (GradScaler)'}, or use bf16."
                )
            if t.lost > _LOST_SHARE:
                texts.append(f"weight {t.name}: {t.lost:.0%} of its updates are rounded away.")
        return tuple(texts)

    def _step_warnings(self) -> Iterator[str]:
        if told := sum(not s.applied and (s.reason != "gradients" or s.scale <= 1) for s in self.steps):
            yield (
                f"{told} of {self.num_steps} steps were skipped for a loss, a buffer or gradients at scale 1 that are inf or NaN, which no loss scale "
                "repairs: mezzo.diagnose.trace names the op."
            )
        # a scale begins too large, and finds its level
        first = next((i for i, s in enumerate(self.steps) if s.applied), 0)
        counted = self.skipped - (first if first <= _HALVINGS else 0)
        if counted > _SKIPS and counted > _SKIPPED_SHARE * self.num_steps:
            reason = next(s.reason for s in reversed(self.steps) if not s.applied)
            yield f"{self.skipped} of {self.num_steps} steps were skipped; the last because of: {reason}."
        # a hinge has no slope where it has come to be met
        is_unmet = any(s.loss for s in self.steps[-1:]) and 2 * self.zero > self.sampled
        if self.zero and (is_unmet or self.zero == self.sampled):
            yield (
                f"every sampled gradient was 0 in {self.zero} of {self.sampled} sampled steps: nothing is learned. In fp16 they underflow "
                f"{'at a small' if self.loss_scale > 1 else 'without a'} loss scale; else the loss has no slope, as where all margins are kept, or does not reach the weights."
            )
        elif self.dead and self.sampled >= _LEAST_DEAD:
            yield (
                f"the gradient of {listed(self.dead)} was 0 in all {self.sampled} sampled steps: what stands behind passes none back, "
                "as a dead ReLU, a clamp or round do, or a factor of 0."
            )
        if self.still >= _LEAST_STILL and not self.sampled:
            yield f"the learning rate was 0 in all {self.still} sampled steps: no weight moved. Print what the schedule gives."
        if self.cleared:
            yield (
                f"in {self.cleared} of {self.sampled} sampled steps the gradients were 0 when the optimizer took them, and not after backward: cleared "
                "before the step, clipped to a norm that is inf, or divided until 16 bit flushed them."
            )
        if self.idle:
            yield (
                f"{self.idle} of {self.sampled} sampled steps moved no sampled weight: the updates are smaller than half the "
                f"spacing of the weights. {f'Keep masters ({self.masters}), or raise' if self.masters else 'Raise'} the rate."
            )

    def _scale_in_words(self) -> str:
        if len({s.scale for s in self.steps}) != 1 or not self.total("gradient").numbers:
            return number(self.loss_scale)
        bearable = largest_scale(self.total("gradient"), FORMATS["fp16"]) * self.loss_scale
        return f"{number(self.loss_scale)}; the sampled gradients would fit fp16 up to {number(bearable)}"

    @property
    def unseen(self) -> str:
        """What keeps a report without a warning from saying that the run is healthy; empty if nothing does."""
        if not self.num_steps or not self.sampled:
            return "no sampled step was taken" if self.num_steps else "no step was taken"
        missing = [kind for kind in KINDS if all(t.kind != kind for t in self.tensors)]
        return f"no {listed(missing)} was sampled" if missing else ""

    def _health(self) -> str:
        if self.unseen:
            return f"Not enough seen: {self.unseen}."
        skipped = f", {self.skipped} of them skipped" if self.skipped else ""
        return f"Healthy: {self.num_steps} {plural('step', self.num_steps)}{skipped}, {self._rate_in_words()} sampled."

    def _rate_in_words(self) -> str:
        return "each" if self.every == 1 else f"one in {self.every}"

    def document(self) -> Document:
        """Return the layout."""
        skipped = f", {self.skipped} skipped" if self.policy else ""
        pairs = [("steps", f"{self.num_steps}{skipped}; {self._rate_in_words()} sampled")]
        if self.policy:
            pairs.append(("loss scale", self._scale_in_words()))
        pairs.append(("watching took", f"{self.host_share:.1%} of the host's time in this run"))
        if self.unreached and self.sampled:
            pairs.append(("no gradient", f"{listed(self.unreached)}: in none of the sampled steps"))
        if self.states:
            what = f"16-bit buffers that the run wrote: {listed(self.states)}"
            pairs.append(("not looked at", f"{what}; mezzo.diagnose.trace says whether they move"))
        warnings = self.warnings
        verdict = f"{len(warnings)} {plural('thing', len(warnings))} to look at." if warnings else self._health()
        blocks: list[Block] = [Pairs(pairs=tuple(pairs)), *(Note(text=text) for text in warnings[:_ROWS])]
        blocks += [_ranges(self), *_skips(self.steps)]
        details = [*_histograms(self), *_history(self.steps)]
        return Document(
            title=f"mezzo watch of {self.model}" + (f" under {self.policy}" if self.policy else ", not prepared"),
            verdict=verdict,
            is_good=not warnings and not self.unseen,
            blocks=tuple(blocks),
            details=tuple(details),
        )


def _underflows(h: Histogram, compute: str) -> bool:
    """Say whether zeros of a gradient look flushed: there are many, and what is left reaches down to the smallest number."""
    fmt = FORMATS[compute]
    if compute != "fp16" or h.lowest is None:
        return False
    return h.zeros > _ZERO_SHARE * (h.zeros + h.numbers) and h.lowest <= math.log2(fmt.smallest) + _NEAR_END


def _ranges(report: WatchReport) -> Block:
    rows: list[tuple[str | float, ...]] = []
    for kind in KINDS:
        h = report.total(kind)
        if not h.numbers:
            continue
        shares = [x for name in SHOWN for x in (100 * h.flushed(FORMATS[name]), 100 * h.saturated(FORMATS[name]))]
        zeros = 100 * h.zeros / (h.zeros + h.numbers + h.nonfinite)
        rows.append((f"{kind}s", f"2^{h.lowest}…2^{h.highest}", zeros, *shares))
    columns = tuple(f"{name} {what}" for name in SHOWN for what in ("<", ">"))
    return Table(
        title="Share in percent that is 0, and that each format would flush (<) or overflow (>)",
        columns=("kind", "range", "0", *columns),
        rows=tuple(rows),
    )


def _histograms(report: WatchReport) -> list[Block]:
    if (ends := report.ends) is None:
        return []
    chart = Chart(
        title="Exponents of all values, and the range of each format",
        kind="bars",
        labels=_powers(ends),
        series=tuple(Series(name=f"{kind}s", values=_shares(report.total(kind), ends)) for kind in KINDS),
        unit="%",
        bands=_bands(ends),
    )
    return [Heading(text="Where the numbers lie"), chart, *_layers(report, ends), _by_layer(report)]


def _layers(report: WatchReport, ends: tuple[int, int]) -> list[Block]:
    """Show the exponents of each tensor, in the order of the model."""
    blocks: list[Block] = []
    for kind in KINDS:
        found = [t for t in report.tensors if t.kind == kind and t.histogram.numbers]
        if found:
            title, shown = thinned(f"Exponents of {kind}s, layer by layer", found)
            rows = tuple((t.name, _shares(t.histogram, ends)) for t in shown)
            blocks.append(Heat(title=title, labels=_powers(ends), rows=rows, unit="%", bands=_bands(ends)))
    return blocks


def _shares(h: Histogram, ends: tuple[int, int]) -> tuple[float, ...]:
    return tuple(100 * h.counts[e + BIAS] / max(1, h.numbers) for e in range(ends[0], ends[1] + 1))


def _powers(ends: tuple[int, int]) -> tuple[str, ...]:
    return tuple(f"2^{e}" for e in range(ends[0], ends[1] + 1))


def _bands(ends: tuple[int, int]) -> tuple[Band, ...]:
    return tuple(
        (name, math.log2(FORMATS[name].smallest) - ends[0], math.floor(math.log2(FORMATS[name].max)) - ends[0])
        for name in SHOWN
    )


def _by_layer(report: WatchReport) -> Block:
    """Show the range of each tensor, those nearest to a limit of the compute format first."""
    fmt = FORMATS[report.compute]
    numeric = [t for t in report.tensors if t.histogram.numbers]
    worst = sorted(numeric, key=lambda t: (t.histogram.headroom(fmt), -t.histogram.flushed(fmt)))[:_ROWS]
    return Table(
        title=f"Nearest to the limits of {report.compute}",
        columns=("kind", "name", "range", "headroom, binades", "flushed %", "updates lost %"),
        rows=tuple(
            (t.kind, t.name, f"2^{t.histogram.lowest}…2^{t.histogram.highest}", t.histogram.headroom(fmt),
             100 * t.histogram.flushed(fmt), 100 * t.lost)
            for t in worst
        ),
    )  # fmt: skip


def _history(steps: tuple[StepRecord, ...]) -> list[Block]:
    if not steps:
        return []
    over_steps, shown = thinned("over steps", steps)
    norms = tuple(math.log2(s.grad_norm) if s.applied and s.grad_norm > 0 else math.nan for s in shown)
    series = (
        Series(name="loss scale", values=tuple(math.log2(s.scale) if s.scale > 0 else math.nan for s in shown)),
        Series(name="gradient norm", values=norms),
    )
    labels = tuple(str(s.step) for s in shown)
    losses = Series(name="loss", values=tuple(math.nan if s.loss is None else s.loss for s in shown))
    title = f"Loss scale and gradient norm {over_steps}"
    charts: list[Block] = [Chart(title=title, kind="lines", labels=labels, series=series, unit="log2")]
    if any(math.isfinite(value) for value in losses.values):
        charts.append(Chart(title=f"Loss {over_steps}", kind="lines", labels=labels, series=(losses,), unit="loss"))
    return charts


def _skips(steps: tuple[StepRecord, ...]) -> list[Block]:
    skipped = [s for s in steps if not s.applied]
    if not skipped:
        return []
    rows = tuple((s.step, number(s.scale), s.reason, ", ".join(s.names)) for s in skipped[-_ROWS:])
    columns = ("step", "scale", "not finite", "parameters")
    return [Table(title="Skipped steps, the latest last", columns=columns, rows=rows)]
