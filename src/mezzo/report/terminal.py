"""Sets a document as text for a terminal."""

from __future__ import annotations

import io
import math

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from .document import Block, Chart, Document, Heading, Heat, Note, Pairs, Source, Table
from .plain import HEAT_ROWS, cell, sparkline

WIDTH = 110
_TONES = {"plain": "bold", "good": "bold green", "bad": "bold red"}


def _titled(title: str, grid: Grid) -> RenderableType:
    return Group(Text(title, style="bold"), grid) if title else grid


def _table(block: Table) -> RenderableType:
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(block.columns):
        numeric = all(not isinstance(row[i], str) for row in block.rows)
        grid.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in block.rows:
        grid.add_row(*(Text(cell(c)) for c in row))
    return _titled(block.title, grid)


def _facts(block: Pairs) -> RenderableType:
    grid = Grid(box=None, show_header=False, padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in block.pairs:
        grid.add_row(Text(name), Text(value))
    return grid


def _chart(block: Chart) -> RenderableType:
    grid = Grid(box=None, show_header=False, padding=(0, 2, 0, 0))
    for series in block.series:
        finite = [v for v in series.values if math.isfinite(v)]
        ends = f"{min(finite):.4g} … {max(finite):.4g} {block.unit}" if finite else "no finite value"
        grid.add_row(Text(series.name), Text(sparkline(series.values)), Text(ends))
    return _titled(block.title, grid)


def _heat(block: Heat) -> RenderableType:
    grid = Grid(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, values in block.rows[:HEAT_ROWS]:
        grid.add_row(Text(name), Text(sparkline(values)))
    rest = len(block.rows) - HEAT_ROWS
    if rest > 0:
        grid.add_row(Text(f"… and {rest} more, on the page"), Text(""))
    return _titled(f"{block.title}, {block.labels[0]} to {block.labels[-1]}" if block.labels else block.title, grid)


def _source(block: Source) -> RenderableType:
    grid = Grid(box=None, show_header=False, padding=(0, 1, 0, 0))
    grid.add_column(justify="right", style="dim", no_wrap=True, min_width=5)
    grid.add_column(no_wrap=True, max_width=52)
    grid.add_column(no_wrap=True)
    for number, text, note, is_fault in block.lines:
        grid.add_row(str(number), Text(text, style="bold red" if is_fault else ""), Text(note, style="dim"))
    return _titled(block.file, grid)


def _block(block: Block) -> RenderableType:
    if isinstance(block, Heading):
        return Group(Text(""), Text(block.text, style=_TONES[block.tone]))
    if isinstance(block, Note):
        return Text(block.text)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Chart):
        return _chart(block)
    if isinstance(block, Heat):
        return _heat(block)
    return _facts(block) if isinstance(block, Pairs) else _source(block)


def render(document: Document, *, width: int = WIDTH, colour: bool = False, full: bool = False) -> str:
    """Set a document as text.

    Args:
        document: what to set.
        width: in characters.
        colour: write terminal colours.
        full: the details too.

    Returns:
        The text, without trailing blanks on any line.
    """
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, highlight=False, emoji=False)
    console.print(Text(document.title, style="bold"))
    console.print(Text(document.verdict, style=_TONES["good" if document.is_good else "bad"]))
    blocks = (*document.blocks, *(document.details if full else ()))
    for block in blocks:
        console.print(Padding(_block(block), (0, 0, 0, 0 if isinstance(block, Heading) else 2)))
    written = console.file
    assert isinstance(written, io.StringIO)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
