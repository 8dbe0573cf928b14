"""The names of classes in their order, and of the labels that data has for them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError, did_you_mean
from .text_files import Row, read_text


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
    text = read_text(path, "label map", (".json", ".tsv"))
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
