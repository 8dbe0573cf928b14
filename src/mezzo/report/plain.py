"""Sets a document as plain text with nothing but Python: where the rich package is not installed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .document import Block, Cell, Chart, Document, Heading, Heat, Note, Pairs, Source, Table

_BARS = "▁▂▃▄▅▆▇█"
HEAT_ROWS = 16


def cell(value: Cell) -> str:
    """Write a table cell: whole numbers with separators, others with four digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def sparkline(values: tuple[float, ...]) -> str:
    """Draw finite values as a row of bars, on their own scale.

    >>> sparkline((0.0, 1.0, 2.0, 3.0))
    '▁▃▆█'
    """
    finite = [v for v in values if math.isfinite(v)]
    low, span = (min(finite), (max(finite) - min(finite)) or 1.0) if finite else (0.0, 1.0)
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] if math.isfinite(v) else "x" for v in values)


def _grid(rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> Iterator[str]:
    """Yield the lines of a table whose columns are as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if index < len(right) and right[index] else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells)


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield from ("", block.text)
        case Note():
            yield block.text
        case Pairs():
            yield from _grid(block.pairs)
        case Table():
            yield from filter(None, [block.title])
            right = [all(not isinstance(row[i], str) for row in block.rows) for i in range(len(block.columns))]
            yield from _grid([block.columns, *([cell(value) for value in row] for row in block.rows)], right)
        case Chart():
            yield from filter(None, [block.title])
            yield from _grid([(series.name, sparkline(series.values)) for series in block.series])
        case Heat():
            yield from filter(None, [block.title])
            yield from _grid([(name, sparkline(values)) for name, values in block.rows[:HEAT_ROWS]])
        case Source():
            yield block.file
            yield from _grid([(str(number), text, note) for number, text, note, _ in block.lines], [True])


def render(document: Document, *, full: bool = False) -> str:
    """Set a document as text.

    Args:
        document: what to set.
        full: the details too.

    Returns:
        The text, without trailing blanks on any line.
    """
    lines = [document.title, document.verdict]
    for block in (*document.blocks, *(document.details if full else ())):
        indent = "" if isinstance(block, Heading) else "  "
        lines += [f"{indent}{line}".rstrip() for line in _lines(block)]
    return "\n".join(lines)
