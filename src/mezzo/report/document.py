"""What a report shows, before anybody decides how: headings, sentences, tables, charts, annotated source."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from ..formats import dtype_name

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
        from .terminal import render

        return render(self.document())

    def to_text(self, *, full: bool = True) -> str:
        """Return the report as text: all of it, or what fits one screen."""
        from .terminal import render

        return render(self.document(), full=full)

    def to_json(self) -> str:
        """Return the data as JSON text; inf and NaN are written as words."""
        return json.dumps({"report": type(self).__name__, **to_plain(self)}, indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page that opens without a network.

        Args:
            path: file to write; its folder must exist.

        Returns:
            The path.
        """
        from .html import render

        path = Path(path)
        path.write_text(render(self.document()), encoding="utf-8")
        return path
