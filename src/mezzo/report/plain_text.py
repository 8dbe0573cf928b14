"""Sets a document as text, and any table: nothing but Python."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from .document import Block, Cell, Chart, Document, Heading, Heat, Note, Pairs, Source, Table, printable

WIDTH = 100
_ROWS, _NOTES = 8, 5
"""Rows of a table, and notes in a row, that are shown of a report that is to fit one screen."""
_BARS = "▁▂▃▄▅▆▇█"
_HEAT_ROWS = 16
_CODE = 52
"""Characters of a source line that are shown."""
_NARROWEST = 16
_COLOURS = {"plain": "1", "good": "1;32", "bad": "1;31"}


def cell(value: Cell) -> str:
    """Write a table cell: whole numbers with separators, others with four digits."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def sparkline(values: tuple[float, ...]) -> str:
    """Draw finite values as a row of bars, on their own scale.

    >>> sparkline((0.0, 1.0, 2.0, 3.0))
    '▁▃▆█'
    """
    halves = [v / 2 for v in values]  # whose differences fp64 can hold
    finite = [v for v in halves if math.isfinite(v)]
    low, span = (min(finite), (max(finite) - min(finite)) or 1.0) if finite else (0.0, 1.0)
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] if math.isfinite(v) else "x" for v in halves)


def grid(
    rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), width: int | None = None, gap: str = "  "
) -> Iterator[str]:
    """Yield the lines of a table: columns as wide as they must be, the widest folded where the line has no room.

    Columns at the indices `right` are set to the right; `width` is in characters, and None folds nothing.
    """
    widths = [max(len(line) for text in column for line in text.split("\n")) for column in zip(*rows, strict=True)]
    if width is not None and widths:
        widest = widths.index(max(widths))
        others = sum(widths) - widths[widest] + len(gap) * (len(widths) - 1)
        widths[widest] = min(widths[widest], max(_NARROWEST, width - others))
    for row in rows:
        folded = [_folded(text, size) for text, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*folded, fillvalue=""):
            sized = enumerate(zip(parts, widths, strict=True))
            yield gap.join(t.rjust(w) if i in right else t.ljust(w) for i, (t, w) in sized).rstrip()


def _folded(text: str, width: int) -> list[str]:
    """Fold at blanks alone: a path or an expression that is cut could not be copied."""
    if len(text) <= width and "\n" not in text:
        return [text]
    folds = (textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False) for line in text.split("\n"))
    return [part for lines in folds for part in lines or [""]]


def table_text(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    right: Sequence[int] | None = None,
    width: int | None = None,
) -> str:
    """Set rows under named columns, as `grid` does; `right` defaults to the columns that hold numbers alone.

    >>> print(table_text(("op", "calls"), [("mm", 12), ("add", 3456)]))
    op   calls
    mm      12
    add  3,456
    """
    if right is None:
        right = [i for i in range(len(columns)) if all(not isinstance(row[i], str) for row in rows)]
    return "\n".join(grid([columns, *([cell(c) for c in row] for row in rows)], right=right, width=width))


def _chart(block: Chart) -> Iterator[tuple[str, str, str]]:
    for series in block.series:
        finite = [v for v in series.values if math.isfinite(v)]
        ends = f"{min(finite):.4g} … {max(finite):.4g} {block.unit}" if finite else "no finite value"
        yield series.name, sparkline(series.values), ends


def _heat(block: Heat) -> Iterator[tuple[str, str]]:
    rest = len(block.rows) - _HEAT_ROWS
    yield from ((name, sparkline(values)) for name, values in block.rows[:_HEAT_ROWS])
    if rest > 0:
        yield f"… and {rest} more, on the page", ""


def _title(block: Table | Chart | Heat) -> list[str]:
    ends = f", {block.labels[0]} to {block.labels[-1]}" if isinstance(block, Heat) and block.labels else ""
    return [block.title + ends] if block.title else []


def _lines(block: Block, width: int) -> list[str]:
    match block:
        case Heading():
            found = ["", block.text]
        case Note():
            found = _folded(block.text, width)
        case Pairs():
            found = [*grid(block.pairs, width=width)]
        case Table():
            found = [*_title(block), *table_text(block.columns, block.rows, width=width).split("\n")]
        case Chart() | Heat():
            found = [*_title(block), *grid([*(_chart(block) if isinstance(block, Chart) else _heat(block))])]
        case Source():
            rows = [(f"{number:>5}", text[:_CODE], note) for number, text, note, _ in block.lines]
            found = [block.file, *grid(rows, right=[0], gap=" ")]
    return found


def _painted(text: str, tone: str, colour: bool) -> str:
    return f"\x1b[{_COLOURS[tone]}m{text}\x1b[0m" if colour and text else text


def _shortened(blocks: Sequence[Block]) -> Iterator[Block]:
    """Yield blocks with the first rows of each table and the first of notes that follow each other."""
    for is_note, run in groupby(blocks, lambda block: isinstance(block, Note)):
        found = list(run)
        for block in found[:_NOTES] if is_note else found:
            rest = max(0, len(block.rows) - _ROWS) if isinstance(block, Table) else 0
            yield replace(block, rows=block.rows[:_ROWS]) if isinstance(block, Table) else block
            if rest:
                yield Note(text=f"… and {rest} more")
        if is_note and len(found) > _NOTES:
            yield Note(text=f"… and {len(found) - _NOTES} more")


def render_text(document: Document, *, width: int = WIDTH, colour: bool = False, full: bool = False) -> str:
    """Set a document as text, without trailing blanks; `full` adds the details and all rows of tables."""
    document = printable(document)
    tone = "good" if document.is_good else "bad"
    lines = [_painted(line, "plain", colour) for line in _folded(document.title, width)]
    lines += [_painted(line, tone, colour) for line in _folded(document.verdict, width)]
    for block in (*document.blocks, *document.details) if full else _shortened(document.blocks):
        if isinstance(block, Heading):
            lines += [_painted(line, block.tone, colour) for line in _lines(block, width)]
        else:
            lines += [f"  {line}".rstrip() for line in _lines(block, width - 2)]
    return "\n".join(lines)
