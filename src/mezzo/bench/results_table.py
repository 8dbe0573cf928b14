"""Results as rows of words, set as a terminal table or as Markdown, and as pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..errors import plural
from ..files import write_text
from ..report import Chart, Series, draw, table_text
from .measurement import Measurement, Result
from .variant import VARIANTS

MISSING = "-"
_STYLE = "<style>text { font: 11px system-ui, sans-serif; } .grid { stroke: #ccc; stroke-width: .6; }</style>"
_GAP = 26
"""Pixels above each chart for its title."""


def in_seconds(*seconds: float) -> str:
    """Return durations in the unit that suits the shortest.

    >>> in_seconds(12.3456), in_seconds(0.0123456), in_seconds(4.2e-5, 6e-5)
    ('12.35 s', '12.35 ms', '42.00-60.00 us')
    """
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    size, unit = next((pair for pair in units if min(seconds) >= pair[0]), units[-1])
    return f"{'-'.join(f'{s / size:.2f}' for s in seconds)} {unit}"


def in_bytes(count: float) -> str:
    """Return bytes in millions.

    >>> in_bytes(1283.84e6)
    '1283.8 MB'
    """
    return f"{count / 1e6:.1f} MB"


def _times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}x"


def label(measurement: Measurement) -> str:
    """Return what a table calls a variant: its name, with the policy in place of prepare's, and what else is on."""
    name, *also = measurement.variant.split("+")
    if name in VARIANTS and VARIANTS[name].policy:
        name = f"prepare {VARIANTS[name].policy.format(dtype=measurement.number_format)}"
    words = {"keep": "kept", "compile": "compiled", "capture": "captured"}
    return ", ".join([name, *(words[word] for word in also)])


def fastest_rival(result: Result, point: str, *, keeps: bool, compiled: bool) -> Measurement | None:
    """Return the fastest mixed precision of another library at a point, run in the same way; None if none was."""
    alike = {v.name for v in VARIANTS.values() if v.is_rival and v.keeps == keeps and v.compiled == compiled}
    found = [measurement for measurement in result.at(point).values() if measurement.variant in alike]
    return min(found, key=lambda measurement: measurement.median, default=None)


def fastest_rival_alike(result: Result, measurement: Measurement) -> Measurement | None:
    """Return the fastest rival that ran in the way of a measurement: compiled or not, with kept memory or without."""
    _, *also = measurement.variant.split("+")
    return fastest_rival(result, measurement.point, keeps="keep" in also, compiled="compile" in also)


def header(result: Result) -> tuple[str, ...]:
    """Return the column names of a result's table."""
    return tuple(cells(result, result.measurements[0]))


def cells(result: Result, measurement: Measurement) -> dict[str, str]:
    """Return one measurement as words, by the column of a table; the point has one where there are several, and what else a workload measured."""
    share = result.share_of_roofline(measurement)
    fp32 = result.at(measurement.point).get("fp32")
    rival = fastest_rival_alike(result, measurement)
    own, names = measurement.measures, dict.fromkeys(name for m in result.measurements for name in m.measures)
    return {
        **({"point": measurement.point} if len(points_of(result)) > 1 else {}),
        "variant": label(measurement),
        "time": in_seconds(measurement.median),
        "fastest-slowest": in_seconds(measurement.low, measurement.high),
        f"per {result.unit}": in_seconds(measurement.median / measurement.units),
        "faster than fp32": _times(result.ratio(measurement, "fp32")),
        "than fastest rival": _times(rival.median / measurement.median if rival else None),
        "of roofline": MISSING if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}",
        "peak memory": in_bytes(measurement.peak_bytes),
        "of fp32's": _times(measurement.peak_bytes / fp32.peak_bytes if fp32 and fp32.peak_bytes > 0 else None),
        "loss": f"{measurement.loss:.6g}",
        **{name: f"{own[name]:.4g}" if name in own else MISSING for name in names},
    }


def points_of(result: Result) -> tuple[str, ...]:
    """Return the labels of a result's points in the order they were measured."""
    return tuple(dict.fromkeys(m.point for m in result.measurements))


def machine_name(result: Result) -> str:
    """Return what the result was taken on, for a reader: the GPU, or the CPU and its threads."""
    machine = result.machine
    if machine["device"] == "cuda":
        return str(machine["gpu"]["name"])
    return f"{machine['cpu']['model']}, {machine['threads']} {plural('thread', machine['threads'])}"


def title(result: Result) -> str:
    """Return what a result is of: workload, its size if it has only one, machine, rounds."""
    points = points_of(result)
    size = f" {points[0]}" if len(points) == 1 else ""
    rounds = len(result.measurements[0].seconds)
    taken = f"median of {rounds} interleaved rounds" if rounds > 1 else "one round"
    return f"{result.workload}{size} on {machine_name(result)}: {taken}"


def footnotes(result: Result) -> tuple[str, ...]:
    """Return what a reader must know about the figures, one sentence a line."""
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in result.peak_rates.matmul.items())
    bandwidth = min(result.peak_rates.stream.items(), key=lambda item: -item[0])[1]
    data = max(m.data_bytes for m in result.measurements)
    batches = f" The batches kept on the device are {in_bytes(data)} of it." if data else ""
    return (
        "Rivals: torch.autocast, torch.amp, Accelerate, Fabric, FlashOptim and torchao as far as they are in the table, run as the row is.",
        f"Peak rates measured in the same run: products {rates} GFLOP/s, memory {bandwidth / 1e9:.1f} GB/s.",
        "Roofline: the least work of each phase over these peak rates; 100% is as fast as the machine can be.",
        f"Peak memory is above the process's baseline after import.{batches}",
        f"Tests of the timed code: {result.tests}.",
    )


def text_table(head: Sequence[str], sections: Sequence[Sequence[Sequence[str]]]) -> str:
    """Return rows of words under their names, a blank line between sections, names to the left and figures to the right."""
    folded = [re.sub(r" (than|of|memory|kept)\b", r"\n\1", name) for name in head]
    rows = [row for section in sections for row in ([""] * len(head), *section)]
    right = [index for index, name in enumerate(head) if name not in ("point", "job", "variant")]
    return table_text(folded, rows, right=right)


def print_result(result: Result, file: TextIO | None = None) -> None:
    """Print the table of a result with its footnotes. Writes: `file`, standard output when left out."""
    sections = [[[*cells(result, m).values()] for m in result.at(point).values()] for point in points_of(result)]
    print(title(result), text_table(header(result), sections), "", *footnotes(result), sep="\n", file=file)


def _variant_charts(result: Result) -> tuple[Chart, ...]:
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


def _size_chart(result: Result, axis: str) -> Chart:
    points = [point for point in points_of(result) if result.rooflines[point].axis == axis]
    known = dict.fromkeys(m.variant for m in result.measurements if m.variant in VARIANTS)
    own = [variant for variant in known if VARIANTS[variant].is_mezzo]

    def gain(point: str, variant: str) -> float:
        found = result.at(point).get(variant)
        rival = fastest_rival_alike(result, found) if found else None
        return rival.median / found.median if found and rival else math.nan

    values = {variant: tuple(gain(point, variant) for point in points) for variant in own}
    series = tuple(Series(name=name, values=found) for name, found in values.items() if any(map(math.isfinite, found)))
    return Chart(
        title=f"{title(result)}: times as fast as the fastest rival, by {axis or 'point'}",
        kind="lines" if axis else "bars",
        labels=tuple(f"{result.rooflines[point].value:,.12g}" if axis else point for point in points),
        series=series,
        unit="x",
    )


def charts(result: Result) -> tuple[Chart, ...]:
    """Return the pictures of a result: of its variants at one size, or one for each axis along which sizes vary."""
    if len(points_of(result)) == 1:
        return _variant_charts(result)
    return tuple(_size_chart(result, axis) for axis in dict.fromkeys(r.axis for r in result.rooflines.values()))


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
    """Write the pictures of a result as SVG: time and memory where there is one size, the gain over the fastest rival where a size varies."""
    write_text(path, picture(result))
