"""Results as pictures: time and memory where there is one size, the gain over the fastest rival where a size varies."""

from __future__ import annotations

import math
import re
from pathlib import Path

from ..report import Chart, Series, draw
from .measurement import Result
from .results_table import fastest_rival_alike, label, points_of, title
from .variant import VARIANTS

_STYLE = "<style>text { font: 11px system-ui, sans-serif; } .grid { stroke: #ccc; stroke-width: .6; }</style>"
_GAP = 26
"""Pixels above each chart for its title."""


def _of_variants(result: Result) -> tuple[Chart, ...]:
    found = result.measurements
    labels = tuple(label(m) for m in found)
    times = [m.median / m.units for m in found]
    unit, a_second = ("s", 1.0) if min(times) >= 1 else ("ms", 1e3)
    return tuple(
        Chart(title=name, kind="bars", labels=labels, series=(Series(name=unit_of, values=values),), unit=unit_of)
        for name, unit_of, values in (
            (f"{title(result)}: time a {result.unit}", unit, tuple(a_second * time for time in times)),
            ("peak memory above import", "MB", tuple(m.peak_bytes / 1e6 for m in found)),
        )
    )


def _of_sizes(result: Result, axis: str) -> Chart:
    points = [point for point in points_of(result) if result.rooflines[point].axis == axis]
    own = dict.fromkeys(
        m.variant for m in result.measurements if m.variant in VARIANTS and VARIANTS[m.variant].is_mezzo
    )

    def gain(point: str, variant: str) -> float:
        found = result.at(point).get(variant)
        rival = fastest_rival_alike(result, found) if found else None
        return rival.median / found.median if found and rival else math.nan

    values = {variant: tuple(gain(point, variant) for point in points) for variant in own}
    return Chart(
        title=f"{title(result)}: times as fast as the fastest rival, by {axis or 'point'}",
        kind="lines" if axis else "bars",
        labels=tuple(f"{result.rooflines[point].value:g}" if axis else point for point in points),
        series=tuple(
            Series(name=variant, values=found) for variant, found in values.items() if any(map(math.isfinite, found))
        ),
        unit="x",
    )


def charts(result: Result) -> tuple[Chart, ...]:
    """Return the pictures of a result: of its variants at one size, or one for each axis along which sizes vary."""
    if len(points_of(result)) == 1:
        return _of_variants(result)
    return tuple(_of_sizes(result, axis) for axis in dict.fromkeys(r.axis for r in result.rooflines.values()))


def picture(result: Result) -> str:
    """Return the pictures of a result below each other, as one SVG file that stands alone."""
    parts, top, width = [], 0, 0
    for chart in charts(result):
        drawn = draw(chart)
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawn)
        assert size is not None
        width, height = int(size[1]), int(size[2])
        pixels = min(11, 11 * (width - 8) / (7 * len(chart.title)))  # a bold letter of 11 pixels is 7 wide
        font = f"font: bold {pixels:.1f}px system-ui, sans-serif"
        parts.append(f'<text x="4" y="{top + 16}" style="{font}">{chart.title}</text>')
        parts.append(drawn.replace("<svg ", f'<svg y="{top + _GAP}" width="{width}" height="{height}" ', 1))
        top += height + _GAP
    head = f'<svg viewBox="0 0 {width} {top}" width="{width}" height="{top}" xmlns="http://www.w3.org/2000/svg">'
    return "".join((head, _STYLE, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"))


def save_chart(result: Result, path: Path) -> None:
    """Write the picture of a result as SVG.

    Writes: the file.
    """
    path.write_text(picture(result), encoding="utf-8")
