"""What a document shows: names from outside spelled out, and beside the user's lines what their values were."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import faulty_forward

import mezzo.diagnose as diagnose
from mezzo.report import Document, Heading, Heat, Note, Pairs, Source, Table, render_page, render_text


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
