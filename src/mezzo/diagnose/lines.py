"""Magnitudes of what each line of source computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from ..formats import dtype_name
from .records import LineRange, Phase, Site

_ORDER: dict[Phase, int] = {"forward": 0, "backward": 1, "optimizer": 2}


@dataclass(slots=True)
class _Range:
    low: float = math.inf
    high: float = 0.0
    dtypes: set[str] = field(default_factory=set)
    ops: set[str] = field(default_factory=set)


class LineWatch:
    """Collects, for each line and phase, the range of the largest magnitudes of its results."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[str, int, Phase], _Range] = {}

    def see(self, site: Site, out: list[Tensor], tops: list[float]) -> None:
        """Take in one op's results and their largest magnitudes."""
        if site.frame is None:
            return
        known = self._ranges.setdefault((site.frame.file, site.frame.line, site.phase), _Range())
        for tensor, top in zip(out, tops, strict=True):
            known.dtypes.add(dtype_name(tensor.dtype))
            known.ops.add(site.op)
            if math.isfinite(top) and top > 0:
                known.low, known.high = min(known.low, top), max(known.high, top)

    def records(self) -> tuple[LineRange, ...]:
        """Return the lines seen so far, by file, line and phase."""
        return tuple(
            LineRange(
                file=file,
                line=line,
                phase=phase,
                dtypes=tuple(sorted(r.dtypes)),
                low=r.low if math.isfinite(r.low) else 0.0,
                high=r.high,
                ops=tuple(sorted(r.ops)),
            )
            for (file, line, phase), r in sorted(
                self._ranges.items(), key=lambda item: (*item[0][:2], _ORDER[item[0][2]])
            )
        )
