"""One layout, three forms: text, JSON, and a page that opens without a network."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import faulty_forward

import mezzo.diagnose as diagnose
from mezzo.report import (
    Chart,
    Document,
    Heading,
    Heat,
    Note,
    Pairs,
    Report,
    Series,
    Source,
    Table,
    render_page,
    render_text,
    table_text,
)
from mezzo.report.charts import draw, draw_heat
from mezzo.report.report_base import to_plain

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


def test_text_is_golden() -> None:
    assert str(sample()) == GOLDEN


def test_colour_is_written_on_request_only() -> None:
    assert "\x1b[" not in render_text(DOCUMENT)
    assert "\x1b[" in render_text(DOCUMENT, colour=True)


def test_no_line_is_wider_than_the_screen_and_no_word_is_lost() -> None:
    why = "the value overflows " * 20
    document = Document(
        title="t", verdict="v", is_good=True, blocks=(
            Pairs(pairs=(("why", why),)),
            Note(text=why),
            Table(title="", columns=("rule", "why"), rows=(("masked-row", why),)),
        ),
    )  # fmt: skip
    for width in (60, 110):
        text = render_text(document, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.split().count("overflows") == 60


def test_a_table_of_nothing_is_its_head() -> None:
    assert table_text(("op", "calls"), []) == "op  calls"


def test_json_is_strict_and_whole() -> None:
    data = json.loads(sample().to_json(), parse_constant=lambda word: (_ for _ in ()).throw(ValueError(word)))
    assert data == {"report": "Sample", "values": [1.5, "inf", "nan"], "names": ["a", "b"], "dtype": "bf16"}


@pytest.mark.parametrize("kind", ["lines", "bars"])
@pytest.mark.parametrize(
    "values",
    [(1e308, -1e308), (1e308, 1e308), (5e-324, 0.0), (1e-310, 2e-310), (math.inf, -math.inf), (math.nan, 1.0), ()],
)
def test_any_numbers_are_drawn(values: tuple[float, ...], kind: Any) -> None:
    labels = tuple("x" for _ in values)
    chart = Chart(title="c", kind=kind, labels=labels, unit="u", series=(Series(name="s", values=values),))
    document = Document(title="t", verdict="v", is_good=True, blocks=(chart,))
    assert "nan" not in re.sub("<title>.*?</title>", "", draw(chart)) and "c" in render_text(document)


@pytest.mark.parametrize("text", ["\x1b[31mred", "\x1b]0;title\x07", "a\x00b", "half of \ud83d", "[/]", "\x9b1m"])
def test_what_a_terminal_obeys_or_no_file_can_hold_is_spelled(text: str) -> None:
    blocks = (
        Heading(text=text, tone="bad"),
        Pairs(pairs=((text, text),)),
        Note(text=text),
        Table(title=text, columns=(text, text), rows=((text, 1),)),
        Source(file=text, lines=((1, text, text, True),)),
        Heat(title=text, labels=(text,), rows=((text, (1.0,)),), unit=text, bands=((text, 0.0, 1.0),)),
    )
    document = Document(title=text, verdict=text, is_good=False, blocks=blocks)
    for form in (render_text(document), render_page(document)):
        form.encode("utf-8")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", form)
        assert text != "[/]" or form.count("[/]") > 8


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = sample().to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert links == ["data:,"]
    assert [w for w in re.findall(r"https?://[^\s\"'<>]+", page) if "www.w3.org/2000/svg" not in w] == []


def test_a_page_shows_every_block_escaped() -> None:
    page = render_page(DOCUMENT)
    for part in ("a &lt;title&gt;", "Faulty: &amp; more", "heading", "because", "12,345", "a note", "y &lt; 2", "2^3"):
        assert part in page, part
    assert page.count("<svg ") == 3


def test_a_line_breaks_where_a_value_is_missing() -> None:
    drawn = draw(DOCUMENT.blocks[4])
    assert re.search(r'd="(M[^"]*)"', drawn)[1].count("M") == 2
    assert drawn.count("<circle") == 2


def test_bars_start_at_zero_and_keep_their_ratio() -> None:
    heights = [
        float(h)
        for h in re.findall(r'<rect x="[^"]*" y="[^"]*" width="[^"]*" height="([^"]*)" fill', draw(DOCUMENT.blocks[5]))
    ]
    assert len(heights) >= 2 and math.isclose(heights[1] / heights[0], 3, rel_tol=0.01)


def test_a_heat_map_is_darkest_where_most_of_a_row_lies() -> None:
    drawn = draw_heat(DOCUMENT.blocks[6])
    found = [float(v) for v in re.findall(r'fill-opacity="([^"]*)"', drawn)]
    assert found == [round(0.12 + 0.88 / 3, 2), 1.0, 1.0]
    assert drawn.count('class="band"') == 1 and ">fp16<" in drawn


def test_a_trace_report_holds_its_record() -> None:
    with diagnose.trace() as t:
        faulty_forward.feed_forward(torch.float16)()
    data = json.loads(t.report.to_json())
    assert data["report"] == "TraceReport"
    assert data["findings"][0]["verdict"] == "overflow"
    assert data["record"]["events"][0]["wide"][0]["dtype"] == "fp32"
    assert len(data["record"]["sizes"]) == len(t.record.sizes) > 0
    assert to_plain(t.report.findings[0].fix) == data["findings"][0]["fix"]


def test_the_annotated_view_marks_the_fault_in_the_users_code() -> None:
    with diagnose.trace() as t:
        faulty_forward.feed_forward(torch.float16)()
    [source] = [b for b in t.report.document().details if isinstance(b, Source)]
    [fault] = [line for line in source.lines if line[3]]
    assert fault[1].strip() == "return self.down(h)  # FAULT"
    span = r"2\^-?\d+(…2\^-?\d+)?"
    note = rf"fwd fp16 {span}(, most {span})?\nbwd fp16/fp32 {span}(, most {span})?"
    assert re.fullmatch(note, fault[2]), fault[2]


def test_the_range_of_a_line_is_that_of_its_values(tmp_path: Path) -> None:
    """Counted here by frexp over every result of the line."""
    program = tmp_path / "program.py"
    program.write_text("def f(x):\n    return x.mul(4.0).relu()\n", encoding="utf-8")
    code: dict[str, Any] = {}
    exec(compile(program.read_text(encoding="utf-8"), str(program), "exec"), code)
    x = torch.tensor([2.0**e for e in range(-30, 20)] + [-1.0] * 50)
    with diagnose.trace() as t:
        code["f"](x)
    [line] = [r for r in t.record.lines if r.file == str(program)]
    results = torch.cat([x * 4, (x * 4).relu()])
    exponents = sorted(math.frexp(v)[1] - 1 for v in results.abs().tolist() if v)
    assert (line.lowest, line.highest) == (exponents[0], exponents[-1]) == (-28, 21)
    assert line.middle == (exponents[math.ceil(0.05 * 150) - 1], exponents[math.ceil(0.95 * 150) - 1])
    assert line.zeros == 50 / 200


def test_the_largest_value_of_a_line_is_never_missed() -> None:
    x = torch.ones(100_001)
    x[12_345] = 2.0**40
    with diagnose.trace() as t:
        x.mul(2.0)
    assert max(r.highest for r in t.record.lines if r.highest is not None) == 41


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    with diagnose.trace() as t:
        torch.zeros(2, requires_grad=True).log().sum().backward()
    shown = t.report._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "singularity" in shown and "<script" not in shown
