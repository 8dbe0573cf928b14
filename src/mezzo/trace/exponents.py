"""Histograms of exponents, what each format would make of them, and those of each line of source."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..formats import Format, dtype_name
from .lint_rules import LintWatch
from .measure import exponent_fields, spaced
from .records import LineRange, Phase, Site

BINS = 256
"""One for each value of fp32's exponent field: 0 holds zeros (and fp32's subnormals), 255 inf and NaN."""
BIAS = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """How many sampled values lie in each binade, by fp32 exponent field: `BINS` of them."""

    counts: tuple[int, ...]

    @property
    def zeros(self) -> int:
        """Values that are 0, or below every normal fp32 number."""
        return self.counts[0]

    @property
    def nonfinite(self) -> int:
        """Values that are inf or NaN; they are counted here and nowhere else."""
        return self.counts[BINS - 1]

    @property
    def numbers(self) -> int:
        """Values that are finite and not 0."""
        return sum(self.counts[1 : BINS - 1])

    @property
    def lowest(self) -> int | None:
        """Exponent of the smallest magnitude; None without numbers."""
        return next((e - BIAS for e in range(1, BINS - 1) if self.counts[e]), None)

    @property
    def highest(self) -> int | None:
        """Exponent of the largest magnitude; None without numbers."""
        return next((e - BIAS for e in range(BINS - 2, 0, -1) if self.counts[e]), None)

    def percentile(self, share: float) -> int | None:
        """Return the smallest exponent that at least this share of the numbers do not exceed; None without numbers."""
        wanted, seen = share * self.numbers, 0
        for e in range(1, BINS - 1):
            seen += self.counts[e]
            if seen and seen >= wanted:
                return e - BIAS
        return None

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(counts=tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def flushed(self, fmt: Format) -> float:
        """Return the share of the numbers that become 0 in a format; exactly half of its smallest number counts as kept."""
        limit = math.log2(fmt.smallest) - 1  # 2^e rounds to 0 below half of it
        return self._share(lambda e: e < limit)

    def saturated(self, fmt: Format) -> float:
        """Return the share of the numbers beyond a format's range; what lies below the next power of two counts as kept."""
        limit = math.floor(math.log2(fmt.max))
        return self._share(lambda e: e > limit)

    def _share(self, is_lost: Callable[[int], bool]) -> float:
        lost = sum(count for e, count in enumerate(self.counts[1 : BINS - 1], start=1) if is_lost(e - BIAS))
        return lost / self.numbers if self.numbers else 0.0

    def headroom(self, fmt: Format) -> float:
        """Return how many binades lie between the largest value and a format's largest; inf without numbers."""
        return math.inf if self.highest is None else math.floor(math.log2(fmt.max)) - self.highest


class SampledRows:
    """Samples of many tensors, `width` values of each, in one block of device memory, counted by one reduction a step."""

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self.values = torch.zeros(count, width, dtype=torch.float32, device=device)
        self._ones = torch.ones(1, 1, dtype=torch.int64, device=device).expand(count, width)
        self._counts = torch.zeros(count, BINS, dtype=torch.int64, device=device)
        self.filled = [0] * count
        self._held = [0] * count
        self._steps = 0

    def put(self, row: int, tensor: Tensor) -> None:
        """Keep evenly spaced values of a tensor in place of those that are kept. Writes: one row. Syncs: no."""
        sample = spaced(tensor.detach(), self.values.shape[1])
        count = sample.numel()
        self.values[row, :count].copy_(sample)
        if self._held[row] > count:
            self.values[row, count:].zero_()
        self._held[row] = count

    def count(self) -> None:
        """Add this step's samples to the histograms, all in one reduction. Syncs: no."""
        self._counts.scatter_add_(1, exponent_fields(self.values).long(), self._ones)
        self.values.zero_()
        self.filled = [a + b for a, b in zip(self.filled, self._held, strict=True)]
        self._held = [0] * len(self._held)
        self._steps += 1

    def is_holding(self, begin: int = 0, end: int | None = None) -> bool:
        """Whether values of some rows wait to be counted."""
        return any(self._held[begin:end])

    def histograms(self) -> list[Histogram]:
        """Return the histograms so far. Syncs: one read."""
        width = self.values.shape[1]
        found = []
        for filled, counts in zip(self.filled, self._counts.tolist(), strict=True):
            # places that no value was put into hold zeros
            counts[0] -= width * self._steps - filled
            found.append(Histogram(counts=tuple(counts)))
        return found


def largest_scale(unscaled: Histogram, fmt: Format) -> float:
    """Return the largest power of two that keeps every sampled gradient inside a format, with a binade to spare.

    `unscaled` is of true gradients.

    >>> from mezzo.formats import FORMATS
    >>> largest_scale(Histogram(counts=tuple(int(e == 127 - 10) for e in range(256))), FORMATS["fp16"])
    16777216.0
    """
    return 1.0 if unscaled.highest is None else 2.0 ** (unscaled.headroom(fmt) - 1)


_ORDER: dict[Phase, int] = {"forward": 0, "backward": 1, "optimizer": 2}
_SAMPLED = 4096
"""Values that are counted of each result; its largest is always among those that are shown."""
_TAIL = 0.05
_TIMES, _FROM, _TO = 16, 1e3, 1e15
"""A loop explodes whose line gives results that often in a step, growing from less than the one to more than the other."""
_STEADY = 0.8


@dataclass(slots=True)
class _Range:
    highest: int | None = None
    counts: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    dtypes: set[str] = field(default_factory=set)
    ops: set[str] = field(default_factory=set)

    def see(self, tensor: Tensor, top: float) -> None:
        values = spaced(tensor.detach(), _SAMPLED).float()
        self.counts += torch.bincount(exponent_fields(values), minlength=BINS).cpu()
        if math.isfinite(top) and top > 0:
            exponent = math.frexp(top)[1] - 1
            self.highest = exponent if self.highest is None else max(self.highest, exponent)


@dataclass(slots=True)
class _Loop:
    """Results of an op that a line runs again and again in one step, by their largest magnitudes; `modules` had run before."""

    site: Site
    modules: int
    first: float = 0.0
    last: float = 0.0
    times: int = 0
    rises: int = 0

    def see(self, top: float) -> None:
        self.first, self.rises = self.first or top, self.rises + (top > self.last)
        self.last, self.times = top, self.times + 1

    def explodes(self, modules: int) -> bool:
        """Say so of a recurrence; a stack of layers has another module for each time."""
        is_steady = self.times >= _TIMES and self.rises >= _STEADY * self.times
        return is_steady and modules - self.modules < self.times // 2 and 0 < self.first < _FROM and self.last > _TO


class LineWatch:
    """Collects, for each line and phase, the exponents of its results; where one overflows, tells `lints` of a loop that explodes."""

    def __init__(self, lints: LintWatch) -> None:
        self._ranges: dict[tuple[str, int, Phase], _Range] = {}
        self._loops: dict[tuple[str, str], _Loop] = {}
        self._modules: set[str] = set()
        self._step, self._lints = 0, lints

    def _see_loop(self, site: Site, top: float) -> None:
        if site.step != self._step:
            self._step, self._loops, self._modules = site.step, {}, set()
        self._modules.add(site.module)
        if math.isfinite(top):
            self._loops.setdefault((str(site.frame), site.op), _Loop(site, len(self._modules))).see(top)
        elif (loop := next((x for x in self._loops.values() if x.explodes(len(self._modules))), None)) is not None:
            what = f"{loop.first:.3g} to {loop.last:.3g}"
            self._lints.add("exploding-loop", loop.site, torch.float32, what, loop.times)

    def see(self, site: Site, out: list[Tensor], tops: list[float]) -> None:
        """Take in one op's results and their largest magnitudes. Syncs: yes."""
        if site.frame is None or not out:
            return
        if site.phase == "forward":
            self._see_loop(site, sum(tops))
        known = self._ranges.setdefault((site.frame.file, site.frame.line, site.phase), _Range())
        for tensor, top in zip(out, tops, strict=True):
            known.dtypes.add(dtype_name(tensor.dtype))
            known.ops.add(site.op)
            known.see(tensor, top)

    def records(self) -> tuple[LineRange, ...]:
        """Return the lines seen so far, by file, line and phase."""
        in_order = sorted(self._ranges, key=lambda key: (*key[:2], _ORDER[key[2]]))
        return tuple(_record(*key, self._ranges[key]) for key in in_order)


def _record(file: str, line: int, phase: Phase, r: _Range) -> LineRange:
    histogram = Histogram(counts=tuple(r.counts.tolist()))
    seen = histogram.zeros + histogram.numbers + histogram.nonfinite
    middle = (histogram.percentile(_TAIL), histogram.percentile(1 - _TAIL))
    return LineRange(
        file=file,
        line=line,
        phase=phase,
        dtypes=tuple(sorted(r.dtypes)),
        lowest=r.highest if histogram.lowest is None else histogram.lowest,
        highest=r.highest,
        middle=None if middle[0] is None or middle[1] is None else (middle[0], middle[1]),
        zeros=histogram.zeros / seen if seen else 0.0,
        ops=tuple(sorted(r.ops)),
    )
