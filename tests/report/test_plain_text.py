"""A document as text fits the screen and loses no word."""

from __future__ import annotations

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
