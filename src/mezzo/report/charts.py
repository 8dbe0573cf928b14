"""Draws charts as SVG text: no script, no font, no network."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape
from typing import TypeVar

from .document import Band, Chart, Heat

WIDTH = 760
_PLOT = 190
_LEFT, _RIGHT, _TOP = 56, 12, 30
_BAND_HEIGHT, _ROW_HEIGHT, _NAME_WIDTH = 12, 15, 210
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
_LABELS, _LONGEST, _NAMES = 16, 30, 5
"""Labels of an axis at most, characters of one, and names in a row of the legend."""
_NEAREST, _LARGEST = 1e-300, sys.float_info.max
_FAINT = 1e-3
"""Share of a row's largest value below which nothing is drawn."""


_T = TypeVar("_T")
_MOST = 64


def thinned(title: str, points: Sequence[_T]) -> tuple[str, list[_T]]:
    """Return the points of a chart, evenly thinned to 64 with the first and the last, and its title, which says so. Host only.

    >>> thinned("Layers", range(100))[0]
    'Layers (64 of 100)'
    """
    if (count := len(points)) <= _MOST:
        return title, list(points)
    return f"{title} ({_MOST} of {count:,})", [points[i * (count - 1) // (_MOST - 1)] for i in range(_MOST)]


def _steps(low: float, high: float) -> list[float]:
    """Return round numbers between two ends, four to nine of them.

    >>> _steps(22.76, 55.8)
    [25.0, 30.0, 35.0, 40.0, 45.0, 50.0, 55.0]
    """
    if not _NEAREST < high - low < math.inf:
        return [low, high]  # too near, or too far apart, for steps between them
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = max(s * power for s in (1, 2, 5) if s * power <= (high - low) / 4)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _ends(chart: Chart) -> tuple[float, float]:
    """Return the vertical range: of the finite values, with 0 for bars."""
    values = [v for s in chart.series for v in s.values if math.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if chart.kind == "bars":
        low = min(low, 0.0)
    steps = [f"{step:.4g}" for step in _steps(low, high)]
    # What labels do not tell apart is drawn side by side.
    pad = 0.0 if len(set(steps)) == len(steps) else max(abs(low), abs(high)) / 100 or 0.5
    return max(low - pad, -_LARGEST), min(high + pad, _LARGEST)


def _shortened(label: str, longest: int = _LONGEST) -> str:
    return label if len(label) <= longest else f"…{label[1 - longest :]}"


def _label_height(labels: tuple[str, ...]) -> float:
    return 16 + 3.2 * max((len(_shortened(label)) for label in labels), default=0)


class _Plot:
    """Turns positions and values into pixels."""

    def __init__(self, count: int, low: float, high: float, left: int = _LEFT) -> None:
        self.low, self.high, self.left = low, high, left
        self.count = max(1, count)

    def x(self, position: float) -> float:
        return self.left + (position + 0.5) / self.count * (WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        span = self.high / 2 - self.low / 2  # of halves, since fp64 ends at 1.8e308
        share = (self.high / 2 - value / 2) / span if span else 0.5
        return _TOP + share * _PLOT


def _axes(chart: Chart, plot: _Plot) -> list[str]:
    parts = [f'<text x="{_LEFT - 6}" y="12" text-anchor="end">{escape(chart.unit)}</text>']
    for value in _steps(plot.low, plot.high):
        y = plot.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    return parts


def _labels(labels: tuple[str, ...], plot: _Plot, y: float) -> list[str]:
    every = max(1, math.ceil(len(labels) / _LABELS))
    return [
        f'<text x="{plot.x(i):.1f}" y="{y:.1f}" text-anchor="end" transform="rotate(-30 {plot.x(i):.1f} {y:.1f})">'
        f"<title>{escape(label)}</title>{escape(_shortened(label, min(_LONGEST, int(plot.x(i) / 5.2))))}</text>"
        for i, label in enumerate(labels)
        if i % every == 0
    ]


def _bands(bands: tuple[Band, ...], plot: _Plot, top: float) -> list[str]:
    """Draw each span on a row of its own, with its name before it."""
    parts = []
    for i, (name, low, high) in enumerate(bands):
        left, right = max(plot.left, plot.x(low - 0.5)), min(WIDTH - _RIGHT, plot.x(high + 0.5))
        y = top + _BAND_HEIGHT * (i + 0.5)
        parts.append(f'<text x="{plot.left - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        if right > left:
            parts.append(
                f'<line class="band" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" '
                f'stroke="{_COLOURS[-1 - i % len(_COLOURS)]}"/>'
            )
    return parts


def _lines(chart: Chart, plot: _Plot) -> list[str]:
    parts = []
    for n, series in enumerate(chart.series):
        colour = _COLOURS[n % len(_COLOURS)]
        points = [(plot.x(i), plot.y(v)) if math.isfinite(v) else None for i, v in enumerate(series.values)]
        path, pen = [], "M"
        for point in points:
            path += [f"{pen}{point[0]:.1f} {point[1]:.1f}"] if point else []
            pen = "L" if point else "M"
        parts.append(f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for point, label, value in zip(points, chart.labels, series.values, strict=True):
            if point:
                parts.append(
                    f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="2.4" fill="{colour}">'
                    f"<title>{escape(f'{label}: {value:.4g} {chart.unit}')}</title></circle>"
                )
    return parts


def _bars(chart: Chart, plot: _Plot) -> list[str]:
    parts = []
    slot = (WIDTH - _LEFT - _RIGHT) / plot.count * 0.8
    width = slot / max(1, len(chart.series))
    for n, series in enumerate(chart.series):
        for i, (label, value) in enumerate(zip(chart.labels, series.values, strict=True)):
            if math.isfinite(value) and value != 0:
                x, top, base = plot.x(i) - slot / 2 + n * width, plot.y(max(value, 0)), plot.y(min(value, 0))
                parts.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{base - top:.1f}" '
                    f'fill="{_COLOURS[n % len(_COLOURS)]}"><title>{escape(f"{label}: {value:.4g} {chart.unit}")}</title></rect>'
                )
    return parts


def _legend(chart: Chart) -> list[str]:
    if len(chart.series) == 1 and chart.series[0].name == chart.unit:
        return []
    parts = []
    for n, series in enumerate(chart.series):
        x, y = _LEFT + 8 + 140 * (n % _NAMES), _ROW_HEIGHT * (n // _NAMES)
        parts.append(f'<rect x="{x}" y="{y + 3}" width="10" height="10" fill="{_COLOURS[n % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 12}">{escape(series.name)}</text>')
    return parts


def _svg(title: str, height: float, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">' + "".join(parts) + "</svg>"
    )


def draw(chart: Chart) -> str:
    """Return a chart as one `<svg>` element; exact values show on hovering."""
    plot = _Plot(len(chart.labels), *_ends(chart))
    marks = _lines(chart, plot) if chart.kind == "lines" else _bars(chart, plot)
    below = _TOP + _PLOT + 6
    under = below + _BAND_HEIGHT * len(chart.bands)
    parts = [*_axes(chart, plot), *_bands(chart.bands, plot, below), *marks]
    parts += _labels(chart.labels, plot, under + 10)
    more = _ROW_HEIGHT * (max(0, len(chart.series) - 1) // _NAMES)  # of the legend
    drawn = [f'<g transform="translate(0 {more})">', *parts, "</g>", *_legend(chart)]
    return _svg(chart.title, more + under + _label_height(chart.labels), drawn)


def draw_heat(heat: Heat) -> str:
    """Return a heat map as one `<svg>` element: the darker, the more of the row's values lie there."""
    plot = _Plot(len(heat.labels), 0.0, 1.0, _NAME_WIDTH)
    width = (WIDTH - _NAME_WIDTH - _RIGHT) / plot.count
    parts = []
    for n, (name, values) in enumerate(heat.rows):
        y, most = n * _ROW_HEIGHT, max(values, default=0.0) or 1.0
        shown = _shortened(name, 32)
        parts.append(f'<text x="{_NAME_WIDTH - 6}" y="{y + 11}" text-anchor="end">{escape(shown)}</text>')
        for i, value in enumerate(values):
            if value >= most * _FAINT:
                parts.append(
                    f'<rect x="{plot.x(i - 0.5):.1f}" y="{y}" width="{width:.2f}" height="{_ROW_HEIGHT - 2}" '
                    f'fill="{_COLOURS[0]}" fill-opacity="{0.12 + 0.88 * value / most:.2f}">'
                    f"<title>{escape(f'{name}, {heat.labels[i]}: {value:.3g} {heat.unit}')}</title></rect>"
                )
    below = _ROW_HEIGHT * len(heat.rows) + 4
    under = below + _BAND_HEIGHT * len(heat.bands)
    parts += [*_bands(heat.bands, plot, below), *_labels(heat.labels, plot, under + 10)]
    return _svg(heat.title, under + _label_height(heat.labels), parts)
