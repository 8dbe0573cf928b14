"""A document as text fits the screen and loses no word."""

from __future__ import annotations

import pytest
from tests.report.samples import DOCUMENT, GOLDEN, sample

from mezzo.report import Document, Heading, Note, Pairs, Table, render_text, table_text


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
            Heading(text=why),
            Note(text=why),
            Table(title="", columns=("rule", "why"), rows=(("masked-row", why),)),
        ),
    )  # fmt: skip
    for width in (60, 110):
        text = render_text(document, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.split().count("overflows") == 80


def test_a_table_of_nothing_is_its_head() -> None:
    assert table_text(("op", "calls"), []) == "op  calls"


@pytest.mark.parametrize("width", [60, 100])
def test_a_table_with_two_wide_columns_is_folded_in_both(width: int) -> None:
    why, instead = "the value overflows " * 6, "bound it first " * 9
    rows = [("binary_cross_entropy", "fp32", why, instead), ("exp", "fp32", why, "")]
    text = table_text(("op", "rule", "reason", "instead"), rows, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and text.split().count("overflows") == 12 and text.split().count("bound") == 9
    assert lines[1].startswith("binary_cross_entropy  fp32  the value") and lines[0].index("instead") == lines[1].index(
        "bound"
    )
