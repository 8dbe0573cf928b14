"""A document with a block of each kind, and a report that lays itself out so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mezzo.report import Chart, Document, Heading, Heat, Note, Pairs, Report, Series, Source, Table

DOCUMENT = Document(
    title="a <title>",
    verdict="Faulty: & more",
    is_good=False,
    blocks=(
        Heading(text="heading", tone="bad"),
        Pairs(pairs=(("why", "because"), ("line", "f.py:3"))),
        Note(text="a note"),
        Table(title="table", columns=("name", "count"), rows=(("a", 12345), ("b", 2))),
        Chart(
            title="chart", kind="lines", labels=("x", "y", "z"), unit="log2",
            series=(Series(name="s", values=(0.0, math.nan, 7.0)),),
        ),
        Chart(title="bars", kind="bars", labels=("x", "y"), unit="%", series=(Series(name="s", values=(0.25, 0.75)),)),
        Heat(
            title="heat", labels=("2^0", "2^1", "2^2"), rows=(("a", (0.0, 1.0, 3.0)), ("b", (4.0, 0.0, 0.0))), unit="%",
            bands=(("fp16", 0.0, 1.0),),
        ),
        Source(file="f.py", lines=((3, "x = 1", "2^3", True), (4, "y < 2", "", False))),
    ),
)  # fmt: skip

GOLDEN = """\
a <title>
Faulty: & more

heading
  why   because
  line  f.py:3
  a note
  table
  name   count
  a     12,345
  b          2
  chart
  s  ▁x█  0 … 7 log2
  bars
  s  ▁█  0.25 … 0.75 %
  heat, 2^0 to 2^2
  a  ▁▃█
  b  █▁▁
  f.py
      3 x = 1 2^3
      4 y < 2"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Report):
    values: tuple[float, ...]
    names: frozenset[str]
    dtype: torch.dtype

    def document(self) -> Document:
        return DOCUMENT


def sample() -> Sample:
    return Sample(values=(1.5, math.inf, math.nan), names=frozenset({"b", "a"}), dtype=torch.bfloat16)
