"""Exponents of what each line of source computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..formats import dtype_name
from .exponents import BINS, Histogram
from .measure import exponent_fields, spaced
from .records import LineRange, Phase, Site

_ORDER: dict[Phase, int] = {"forward": 0, "backward": 1, "optimizer": 2}
_SAMPLED = 4096
"""Values that are counted of each result; its largest is always among those that are shown."""
_TAIL = 0.05


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


class LineWatch:
    """Collects, for each line and phase, the exponents of its results."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[str, int, Phase], _Range] = {}

    def see(self, site: Site, out: list[Tensor], tops: list[float]) -> None:
        """Take in one op's results and their largest magnitudes. Syncs: yes."""
        if site.frame is None:
            return
        known = self._ranges.setdefault((site.frame.file, site.frame.line, site.phase), _Range())
        for tensor, top in zip(out, tops, strict=True):
            known.dtypes.add(dtype_name(tensor.dtype))
            known.ops.add(site.op)
            known.see(tensor, top)

    def records(self) -> tuple[LineRange, ...]:
        """Return the lines seen so far, by file, line and phase."""
        return tuple(
            _record(file, line, phase, r)
            for (file, line, phase), r in sorted(
                self._ranges.items(), key=lambda item: (*item[0][:2], _ORDER[item[0][2]])
            )
        )


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
