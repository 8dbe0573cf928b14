"""Results as pictures: bars where there is one size, lines where a size varies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .measurement import Measurement, Result
from .results_table import in_bytes, in_seconds, points_of, title
from .roofline import roofline_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "fp32": "#7f7f7f", "tf32": "#bcbd22", "torch-autocast": "#aec7e8", "torch-amp": "#1f77b4",
    "mezzo-autocast": "#ffbb78", "mezzo-amp": "#ff7f0e", "mezzo-persistent": "#e377c2", "prepare-master": "#d62728",
    "torch-16bit": "#9467bd",
    "accelerate": "#98df8a", "fabric": "#2ca02c",
}  # fmt: skip
ROOFLINE_COLOURS = ("#7f7f7f", "#1f77b4", "#2ca02c")


def _colour(variant: str) -> str:
    return COLOURS.get(variant.removesuffix("+compile"), "#000000")


def _hatch(variant: str) -> str:
    return "//" if variant.endswith("+compile") else ""


def _bars(axes: Axes, found: Sequence[Measurement], what: str) -> None:
    """Draw one horizontal bar a variant, the first on top, with its figure at its end."""
    names = [m.variant for m in found]
    if what == "time":
        values = [m.median for m in found]
        errors = [[m.median - m.low for m in found], [m.high - m.median for m in found]]
        words = [in_seconds(m.median) for m in found]
        ends = [m.high for m in found]
        axes.set_xlabel("seconds a round (median; whiskers: fastest and slowest)")
    else:
        values = [m.peak_bytes / 1e6 for m in found]
        errors = None
        words = [in_bytes(m.peak_bytes) for m in found]
        ends = values
        axes.set_xlabel("peak memory above import, MB")
    bars = axes.barh(names, values, xerr=errors, color=[_colour(n) for n in names], capsize=3)
    for bar, name, end, word in zip(bars, names, ends, words, strict=True):
        bar.set_hatch(_hatch(name))
        axes.annotate(word, (end, bar.get_y() + bar.get_height() / 2), (4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, max(*ends, 1e-12) * 1.25)
    axes.spines[["top", "right"]].set_visible(False)


def _bar_chart(result: Result) -> Figure:
    from matplotlib.figure import Figure

    labels = points_of(result)
    tallest = max(len(result.at(label)) for label in labels)
    figure = Figure(figsize=(11, (0.42 * tallest + 1.3) * len(labels)), layout="constrained")
    grid = figure.subplots(len(labels), 2, squeeze=False)
    for line, label in zip(grid, labels, strict=True):
        found = list(result.at(label).values())
        _bars(line[0], found, "time")
        _bars(line[1], found, "memory")
        line[0].set_title(title(result) if len(labels) == 1 else label, loc="left", fontsize=10)
        line[1].set_yticks([])
    return figure


def _lines(axes: Axes, result: Result, labels: Sequence[str], axis: str) -> None:
    """Draw the time of each variant against the size, with its spread, and the roofline of each format dashed."""
    sizes = [result.rooflines[label].value for label in labels]
    for variant in dict.fromkeys(m.variant for m in result.measurements):
        found = [result.at(label)[variant] for label in labels]
        mark, colour = ("s:" if variant.endswith("+compile") else "o-"), _colour(variant)
        axes.plot(sizes, [m.median / m.units for m in found], mark, ms=4, color=colour, label=variant)
        low, high = [m.low / m.units for m in found], [m.high / m.units for m in found]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    for name, colour in zip(result.rooflines[labels[0]].phases, ROOFLINE_COLOURS, strict=False):
        least = [roofline_seconds(result.rooflines[label].phases[name], result.peak_rates, name) for label in labels]
        axes.plot(sizes, least, "--", lw=1, color=colour, label=f"roofline, {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.yaxis.set_major_formatter(lambda seconds, _: in_seconds(seconds))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.set_xlabel(axis)
    axes.set_ylabel(f"time a {result.unit}")
    axes.grid(alpha=0.3)


def _line_chart(result: Result) -> Figure:
    from matplotlib.figure import Figure

    axes_names = tuple(dict.fromkeys(roofline.axis for roofline in result.rooflines.values()))
    figure = Figure(figsize=(5.2 * len(axes_names) + 1.5, 4.6), layout="constrained")
    panels = figure.subplots(1, len(axes_names), squeeze=False)[0]
    for panel, axis in zip(panels, axes_names, strict=True):
        _lines(panel, result, [p for p in points_of(result) if result.rooflines[p].axis == axis], axis)
    panels[0].set_title(title(result), loc="left", fontsize=10)
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False)
    return figure


def draw(result: Result) -> Figure:
    """Return the picture of a result: lines if every point lies on an axis, else bars."""
    varied = all(roofline.axis for roofline in result.rooflines.values())
    return _line_chart(result) if varied else _bar_chart(result)


def save_chart(result: Result, path: Path) -> None:
    """Write the picture of a result as PNG.

    Writes: the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw(result)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)
