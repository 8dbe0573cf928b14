"""A report: data that is set as text, by nothing but Python, turns into JSON, and into one HTML page."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, as_flag
from ..extras import check_installed, is_there
from ..files import as_path, write_text
from ..formats import dtype_name
from .charts import draw, draw_heat
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
    """Yield the lines of a table: columns as wide as they must be, the widest ones folded where the line has no room.

    Columns at the indices `right` are set to the right; `width` is in characters, and None folds nothing.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(len(line) for text in column for line in text.split("\n")) for column in columns]
    floors = [max([_NARROWEST, *(len(word) for text in column for word in text.split())]) for column in columns]
    for _ in range(0 if width is None else sum(widths) + len(gap) * (len(widths) - 1) - width):
        if foldable := [i for i, size in enumerate(widths) if size > floors[i]]:
            widths[max(foldable, key=widths.__getitem__)] -= 1
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
    yield from ((name, sparkline(values)) for name, values in block.rows[:_HEAT_ROWS])
    if (rest := len(block.rows) - _HEAT_ROWS) > 0:
        yield f"… and {rest} more, on the page", ""


def _title(block: Table | Chart | Heat) -> list[str]:
    ends = f", {block.labels[0]} to {block.labels[-1]}" if isinstance(block, Heat) and block.labels else ""
    return [block.title + ends] if block.title else []


def _lines(block: Block, width: int) -> list[str]:
    match block:
        case Heading():
            found = ["", *_folded(block.text, width)]
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


def to_plain(value: object) -> Any:
    """Return data as JSON knows it: dataclasses as mappings, sets sorted, inf and NaN as words.

    >>> to_plain({"x": (1.0, float("inf"))}), to_plain(torch.float16)
    ({'x': [1.0, 'inf']}, 'fp16')
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (frozenset, set)):
        return [to_plain(v) for v in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def render_page(document: Document) -> str:
    """Set a document as one self-contained HTML page: nothing in it is loaded from elsewhere and no script runs."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def svg(block: Chart | Heat) -> Markup:
        # every text inside is escaped where it is drawn
        return Markup(draw(block) if isinstance(block, Chart) else draw_heat(block))

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(svg=svg, cell=cell, kind=lambda block: type(block).__name__)
    template = environment.from_string(files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8"))
    return template.render(doc=printable(document))


class Report:
    """Base of every diagnosis. A subclass is a frozen dataclass that says how it is laid out."""

    __slots__ = ()

    def document(self) -> Document:
        """Return the layout."""
        raise NotImplementedError

    @property
    def is_healthy(self) -> bool:
        """Whether the diagnosis found nothing to change."""
        return self.document().is_good

    def __str__(self) -> str:
        return self.to_text(full=False)

    def to_text(self, *, full: bool = True) -> str:
        """Return the report as text: all of it, or what fits one screen."""
        return render_text(self.document(), full=as_flag("to_text", "full", full))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the page in a frame of its own, or the text where jinja2 is not installed."""
        if not is_there("jinja2"):
            return f"<pre>{escape(str(self))}</pre>"
        page = escape(render_page(self.document()))
        return f'<iframe srcdoc="{page}" style="width:100%;height:36em;border:0"></iframe>'

    def to_json(self) -> str:
        """Return the data as JSON text; inf and NaN are written as words."""
        return json.dumps({"report": type(self).__name__, **to_plain(self)}, indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page that opens without a network, and return its path.

        Args:
            path: file to write; its folder must exist.

        Raises:
            ConfigError: jinja2 is not installed, or the path is a folder.
            OSError: the page cannot be written; the file is what it was.
        """
        check_installed("to_html", ["jinja2"])
        path = as_path("to_html", "path", path)
        if path.is_dir():
            raise ConfigError(
                f"to_html was given the folder {path}; name the file to write, such as {path / 'report.html'}."
            )
        write_text(path, render_page(self.document()))
        return path
