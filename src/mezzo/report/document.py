"""What a report shows, before anybody decides how: headings, sentences, tables, charts, annotated source."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias

Cell: TypeAlias = str | int | float
"""What one field of a table holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """A title inside a document; its tone is "bad" for faults, "good" for health, "plain" otherwise."""

    text: str
    tone: Literal["plain", "good", "bad"] = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Named values, one a line."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A sentence."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under named columns; numbers are set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Points of a chart: one value per label of the chart; NaN leaves a gap."""

    name: str
    values: tuple[float, ...]


Band: TypeAlias = tuple[str, float, float]
"""A span of a horizontal axis: name, first and last position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines or bars over labelled positions.

    Attributes:
        kind: lines, or bars side by side.
        labels: positions on the horizontal axis.
        series: what is drawn, one value per label.
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
    """A row of shares for each of many things, by name, one value per label; the rest as in `Chart`."""

    title: str
    labels: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    unit: str
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Lines of the user's own code: number, text, note beside it, and whether the line is the fault."""

    file: str
    lines: tuple[tuple[int, str, str, bool], ...]


Block: TypeAlias = Heading | Pairs | Note | Table | Chart | Heat | Source
"""What a document is made of."""


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

    @property
    def is_unseen(self) -> bool:
        """Whether the verdict is that too little was seen for another."""
        return self.verdict.startswith("Not enough seen")


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(value: Any) -> Any:
    """Return a document, or a part of one, in which what terminals obey, or no file can hold, is spelled out in ASCII."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], value)
    if isinstance(value, tuple):
        return tuple(map(printable, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: printable(getattr(value, field.name)) for field in fields(value)})
    return value
