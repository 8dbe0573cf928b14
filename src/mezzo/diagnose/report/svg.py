"""Draws a chart as SVG text: no script, no font, no network."""

from __future__ import annotations

import math
from html import escape

from .document import Chart

WIDTH, HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 64
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
_TICKS = 5
_LABELS = 16


def _scale(chart: Chart) -> tuple[float, float]:
    """Return the vertical range: of the finite values, with 0 for bars."""
    values = [v for s in chart.series for v in s.values if math.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if chart.kind == "bars":
        low = min(low, 0.0)
    return (low - 0.5, high + 0.5) if low == high else (low, high)


class _Frame:
    """Turns positions and values into pixels."""

    def __init__(self, chart: Chart) -> None:
        self.low, self.high = _scale(chart)
        self.count = max(1, len(chart.labels))

    def x(self, position: float) -> float:
        return _LEFT + (position + 0.5) / self.count * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _axes(chart: Chart, frame: _Frame) -> list[str]:
    parts = []
    for i in range(_TICKS):
        value = frame.low + (frame.high - frame.low) * i / (_TICKS - 1)
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    every = max(1, math.ceil(len(chart.labels) / _LABELS))
    for i, label in enumerate(chart.labels):
        if i % every == 0:
            x, y = frame.x(i), HEIGHT - _BOTTOM + 14
            parts.append(
                f'<text x="{x:.1f}" y="{y}" text-anchor="end" transform="rotate(-30 {x:.1f} {y})">{escape(label[-22:])}</text>'
            )
    parts.append(f'<text x="4" y="{_TOP - 2}">{escape(chart.unit)}</text>')
    return parts


def _bands(chart: Chart, frame: _Frame) -> list[str]:
    parts = []
    for i, (name, low, high) in enumerate(chart.bands):
        left, right = max(_LEFT, frame.x(low)), min(WIDTH - _RIGHT, frame.x(high))
        y = HEIGHT - 22 + 7 * (i % 3)
        parts.append(
            f'<line class="band" x1="{left:.1f}" y1="{y}" x2="{right:.1f}" y2="{y}" '
            f'stroke="{_COLOURS[-1 - i % len(_COLOURS)]}"><title>{escape(name)}</title></line>'
        )
    return parts


def _lines(chart: Chart, frame: _Frame) -> list[str]:
    parts = []
    for n, series in enumerate(chart.series):
        colour = _COLOURS[n % len(_COLOURS)]
        points = [(frame.x(i), frame.y(v)) if math.isfinite(v) else None for i, v in enumerate(series.values)]
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


def _columns(chart: Chart, frame: _Frame) -> list[str]:
    parts = []
    slot = (WIDTH - _LEFT - _RIGHT) / frame.count * 0.8
    width = slot / max(1, len(chart.series))
    for n, series in enumerate(chart.series):
        for i, (label, value) in enumerate(zip(chart.labels, series.values, strict=True)):
            if math.isfinite(value) and value != 0:
                x, top, base = frame.x(i) - slot / 2 + n * width, frame.y(max(value, 0)), frame.y(min(value, 0))
                parts.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{base - top:.1f}" '
                    f'fill="{_COLOURS[n % len(_COLOURS)]}"><title>{escape(f"{label}: {value:.4g} {chart.unit}")}</title></rect>'
                )
    return parts


def _legend(chart: Chart) -> list[str]:
    parts = []
    for n, series in enumerate(chart.series):
        x = _LEFT + 130 * n
        parts.append(f'<rect x="{x}" y="{HEIGHT - 12}" width="10" height="10" fill="{_COLOURS[n % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="{HEIGHT - 3}">{escape(series.name)}</text>')
    return parts


def draw(chart: Chart) -> str:
    """Return a chart as one `<svg>` element; exact values show on hovering."""
    frame = _Frame(chart)
    marks = _lines(chart, frame) if chart.kind == "lines" else _columns(chart, frame)
    parts = [*_axes(chart, frame), *_bands(chart, frame), *marks, *_legend(chart)]
    name = escape(chart.title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(parts)
        + "</svg>"
    )
