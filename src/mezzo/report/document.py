"""What a report shows, before anybody decides how: headings, sentences, tables, charts, annotated source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Cell: TypeAlias = str | int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """A title inside a document.

    Attributes:
        text: the title.
        tone: "bad" for faults, "good" for health, "plain" otherwise.
    """

    text: str
    tone: Literal["plain", "good", "bad"] = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Named values, one a line.

    Attributes:
        pairs: (name, value).
    """

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A sentence.

    Attributes:
        text: the sentence.
    """

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under named columns; numbers are set to the right.

    Attributes:
        title: above the table.
        columns: names.
        rows: cells, as many as columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Points of a chart.

    Attributes:
        name: in the legend.
        values: one per label of the chart; NaN leaves a gap.
    """

    name: str
    values: tuple[float, ...]


Band: TypeAlias = tuple[str, float, float]
"""A span of a horizontal axis: name, first and last position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines or bars over labelled positions.

    Attributes:
        title: above the chart.
        kind: lines, or bars side by side.
        labels: positions on the horizontal axis.
        series: what is drawn.
        unit: of the vertical axis.
        bands: spans of the horizontal axis, drawn below it.
    """

    title: str
    kind: Literal["lines", "bars"]
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    unit: str
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Heat:
    """A row of shares for each of many things, over labelled positions.

    Attributes:
        title: above it.
        labels: positions on the horizontal axis.
        rows: name and one value per label.
        unit: of the values.
        bands: spans of the horizontal axis, drawn below it.
    """

    title: str
    labels: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    unit: str
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Lines of the user's own code with notes beside them.

    Attributes:
        file: path.
        lines: (number, text, note, is the fault).
    """

    file: str
    lines: tuple[tuple[int, str, str, bool], ...]


Block: TypeAlias = Heading | Pairs | Note | Table | Chart | Heat | Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A report, ready to be set as text or HTML.

    Attributes:
        title: one line.
        verdict: one sentence that answers the question.
        is_good: the verdict is health.
        blocks: the body; with title and verdict it fits one screen.
        details: the rest, shown on the page and on request.
    """

    title: str
    verdict: str
    is_good: bool
    blocks: tuple[Block, ...]
    details: tuple[Block, ...] = ()
