"""How two runs that should agree are laid out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import listed
from ..report import Block, Chart, Document, Heading, Pairs, Report, Series, Table, thinned
from ..trace import Frame, source_line

Cause = Literal["weights", "random", "arguments", "other op", "missing op", "decision", "kernel", "overflow"]
"""Why two runs part; see `MismatchReport`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpPlace:
    """An op in one of the runs.

    Attributes:
        op: public function, else op.
        frame: its line; None where none is known.
        dtype: of its result, short name.
    """

    op: str
    kernel: str
    module: str
    frame: Frame | None
    dtype: str

    def __str__(self) -> str:
        where = "" if self.frame is None else f" at {self.frame}   {source_line(self.frame)}"
        return f"{self.op} ({self.kernel}, {self.dtype}), module {self.module or '(root)'}{where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchFinding:
    """The first op where two runs part.

    Attributes:
        op: public function, else op.
        what: what differs, in a sentence.
        a: the op in the first run; None where it has none, or where it is that of b.
        b: likewise in the second.
    """

    cause: Cause
    op: str
    module: str
    frame: Frame | None
    what: str
    a: OpPlace | None
    b: OpPlace | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputGap:
    """How far two outputs are from each other.

    Attributes:
        difference: length of the difference over that of a; inf where only one is finite.
        largest: largest difference of an element.
        kl_mean: Kullback-Leibler divergence of the softmax over the last dimension, b from a, in nats, mean over rows.
        kl_max: likewise, the largest row.
        signal: sum of finite magnitudes in a and b; NaN where an element of either is.
    """

    name: str
    difference: float
    largest: float
    kl_mean: float
    kl_max: float
    signal: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchReport(Report):
    """What tells two runs apart.

    Causes: weights (a parameter, buffer or input differs), random (one draws where the other does not, or draws others),
    arguments (the same op with other numbers), other op (other arithmetic), missing op (one leaves it out), decision (rounding
    turned an index or a comparison), kernel (further from fp64 than rounding explains), overflow (16 bit, finite in fp64).

    Attributes:
        finding: the first op where they part; None where what differs is rounding.
        outputs: how far they are from each other.
        worst: the op whose rounding adds most, where nothing but rounding differs; None without any.
        worst_error: its error over its result, against fp64 on what it read.
        growth: (module, difference of its outputs in a and b over a's), in the order they ran.
        ops: ops that were looked at, in a and in b.
    """

    finding: MismatchFinding | None
    outputs: tuple[OutputGap, ...]
    worst: OpPlace | None
    worst_error: float
    growth: tuple[tuple[str, float], ...]
    ops: tuple[int, int]

    @property
    def unseen(self) -> str:
        """What keeps two that do not part from being called equal; empty if nothing does."""
        if nan := [o.name for o in self.outputs if math.isnan(o.signal)]:
            return f"{listed(nan)} held NaN, which hides whatever differs there"
        names = listed([o.name for o in self.outputs])
        is_empty = not any(o.signal for o in self.outputs)
        return f"{names} of both held no number but 0, which hides whatever differs before" if is_empty else ""

    def document(self) -> Document:
        """Return the layout."""
        blocks: list[Block] = []
        if self.finding is not None:
            blocks += _finding(self.finding)
        elif self.worst is not None:
            error = f"{self.worst_error:.2g} of its result"
            blocks.append(Pairs(pairs=(("most rounding in", f"{self.worst}: {error}"),)))
        rows = tuple((o.name, o.difference, o.largest, o.kl_mean, o.kl_max) for o in self.outputs)
        columns = ("output", "difference", "largest", "KL, mean", "KL, largest")
        blocks.append(Table(title="Outputs, b against a", columns=columns, rows=rows))
        return Document(
            title=f"mezzo mismatch: {self.ops[0]:,} ops in a, {self.ops[1]:,} in b",
            verdict=self._verdict(),
            is_good=self.finding is None and not self.unseen,
            blocks=tuple(blocks),
            details=tuple(_growth(self.growth)),
        )

    def _verdict(self) -> str:
        gap = max((o.difference for o in self.outputs), default=0.0)
        if self.finding is None and self.unseen:
            return f"Not enough seen: {self.unseen}."
        if self.finding is None:
            return f"They agree: in fp64 both give the same, and the {f'difference of {gap:.2g} is rounding' if gap else 'outputs are equal'}."
        f = self.finding
        where = f" at {f.frame}" if f.frame else ""
        return f"They part at {f.op}, module {f.module or '(root)'}{where}: {f.what}."


def _finding(f: MismatchFinding) -> list[Block]:
    pairs = [(side, str(place)) for side, place in (("a", f.a), ("b", f.b)) if place is not None]
    return [Heading(text=f"{f.cause}: {f.op}", tone="bad"), Pairs(pairs=(*pairs, ("what", f.what)))]


def _growth(found: tuple[tuple[str, float], ...]) -> list[Chart]:
    title, shown = thinned("Difference of module outputs, b against a, in the order they ran", found)
    values = tuple(math.log2(x) if 0 < x < math.inf else math.nan for _, x in shown)
    labels = tuple(name for name, _ in shown)
    series = Series(name="log2", values=values)
    return [Chart(title=title, kind="lines", labels=labels, series=(series,), unit="log2")] if shown else []
