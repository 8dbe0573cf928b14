"""Labelled texts: read from files, cleaned, their labels named, and split so that no text is on two sides."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import DataError, did_you_mean
from .config import REVIEWS, TrainConfig
from .text_files import Row, read_reviews, read_rows, read_text

SPLIT_SEED = 20180517
"""One split for every run, whatever its seed: test rows stay test rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Texts with labels in three parts that share no text.

    Attributes:
        labels: every label, in the order of the label map, else sorted; a row's class is its index here.
        dropped: how many rows cleaning took out, by reason; "respelled" were not, but their labels lost spaces around them.
    """

    labels: tuple[str, ...]
    train: tuple[Row, ...]
    dev: tuple[Row, ...]
    test: tuple[Row, ...]
    dropped: dict[str, int]

    @property
    def summary(self) -> str:
        """What became of the rows, in a sentence."""
        sizes = f"{len(self.train)} rows to learn from, {len(self.dev)} dev, {len(self.test)} test"
        dropped = [f"{count} {reason}" for reason, count in self.dropped.items() if count and reason != "respelled"]
        lost = f"; dropped: {', '.join(dropped)}" if dropped else ""
        respelled = self.dropped.get("respelled", 0)
        stripped = f"; {respelled} labels lost spaces around them" if respelled else ""
        return f"{sizes}{lost}{stripped}"

    @property
    def fingerprint(self) -> str:
        """A digest of every row in its place, by which a resumed run knows its data again."""
        digest = hashlib.sha256()
        for part in (self.train, self.dev, self.test):
            for row in part:
                digest.update(f"{row.label}\0{row.text}\0".encode())
            digest.update(b"\1")
        return digest.hexdigest()


def clean(rows: Iterable[Row]) -> tuple[list[Row], Counter[str]]:
    """Strip texts and labels, and drop what is empty or has no label, is said twice, or said with two labels.

    Returns the rows kept, in the order of their first appearance, and the number dropped for each reason.
    """
    labels: dict[str, set[str]] = {}
    dropped: Counter[str] = Counter(empty=0, unlabelled=0, duplicate=0, contradictory=0, respelled=0)
    for row in rows:
        text, label = row.text.strip(), row.label.strip()
        dropped["respelled"] += label != row.label
        if not text:
            dropped["empty"] += 1
        elif not label:
            dropped["unlabelled"] += 1
        elif label in labels.setdefault(text, set()):
            dropped["duplicate"] += 1
        else:
            labels[text].add(label)
    kept = [Row(text=text, label=next(iter(found))) for text, found in labels.items() if len(found) == 1]
    dropped["contradictory"] = sum(len(found) for found in labels.values() if len(found) > 1)
    return kept, dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelMap:
    """Names of classes in their order, and the name of each label as the data may have it, the names themselves among them."""

    names: tuple[str, ...]
    by_label: dict[str, str]

    def named(self, rows: Iterable[Row]) -> list[Row]:
        """Return rows whose labels are names. Raises: DataError: a label that the map does not have."""
        found = []
        for row in rows:
            if row.label not in self.by_label:
                nearest = did_you_mean(row.label, self.by_label)
                raise DataError(f"the data has the label {row.label!r}, which the label map lacks.{nearest}")
            found.append(Row(text=row.text, label=self.by_label[row.label]))
        return found


def read_label_map(path: Path) -> LabelMap:
    """Read a label map.

    Args:
        path: a .json file with a list of names in order, a {"name": index} or a {"label": "name"} object; or a .tsv file with
            a label and its name in each line, in order.

    Raises: DataError: missing, not UTF-8, no such map, two classes of one name, or fewer than two.
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
        indexes = [index for index, _ in by_index]
        if indexes != list(range(len(by_index))):
            raise DataError(f"the label map {path} has the indexes {indexes}; they must be 0, 1, 2, ...")
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


def _read(name: str, config: TrainConfig, names: LabelMap | None) -> tuple[list[Row], Counter[str]]:
    rows = read_reviews() if name == REVIEWS else read_rows(name, config.text_column, config.label_column)
    kept, dropped = clean(rows)
    if not kept:
        raise DataError(f"{name} holds no text with one label, so there is nothing to learn from.")
    return kept if names is None else names.named(kept), dropped


def _without(option: str, rows: Iterable[Row], others: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Return the rows of an option's file that are in no other's; a DataError if none is left."""
    taken = {row.text for other in others.values() for row in other}
    left = [row for row in rows if row.text not in taken]
    if not left:
        named = " or ".join(name for name, other in others.items() if other)
        raise DataError(f"every row of {option} stands in {named} too. Write files that have no row in common.")
    return left


def _check(corpus: Corpus, config: TrainConfig) -> None:
    for part in ("train", "dev", "test"):
        if not getattr(corpus, part):
            instead = "" if part == "train" else f", or --{part}-data"
            raise DataError(f"{config.data} is too small: no row is left for {part}. Give more rows{instead}.")
    if len(corpus.labels) < 2:
        raise DataError(
            f"every row of {config.data} has the label {corpus.labels[0]!r}, and a classifier needs two. Is {config.label_column!r} the right --label-column?"
        )
    for part in ("train", "dev", "test"):
        strange = sorted({row.label for row in getattr(corpus, part)} - set(corpus.labels))
        if strange:
            raise DataError(
                f"the {part} rows have the label {strange[0]!r}, which no training row has.{did_you_mean(strange[0], corpus.labels)}"
            )


def load_corpus(config: TrainConfig) -> Corpus:
    """Read, clean and split the data of a run, the same for the same files, whatever the seed of the run.

    Rows of `data` that also stand in the dev or test file are taken out of training.

    Raises: DataError: a file that is missing, empty, not UTF-8, without its columns, with one class, or too small.
    """
    names = None if config.label_map is None else read_label_map(config.label_map)
    rows, dropped = _read(config.data, config, names)
    test = _read(str(config.test_data), config, names)[0] if config.test_data else []
    others = {"--test-data": test}
    dev = _without("--dev-data", _read(str(config.dev_data), config, names)[0], others) if config.dev_data else []
    rows = _without("--data", rows, {"--dev-data": dev, **others})
    random.Random(SPLIT_SEED).shuffle(rows)
    rows = rows[: config.rows or None]
    total = len(rows)
    if not config.test_data:
        test, rows = _take(rows, config.test_share * total)
    if not config.dev_data:
        dev, rows = _take(rows, config.dev_share * total)
    corpus = Corpus(
        labels=tuple(sorted({row.label for row in rows})) if names is None else names.names,
        train=tuple(rows),
        dev=tuple(dev),
        test=tuple(test if config.test_data or config.test_share else dev),
        dropped=dict(dropped),
    )
    _check(corpus, config)
    return replace(corpus, train=corpus.train[: config.limit or None])


def _take(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    size = round(share)
    return list(rows[:size]), list(rows[size:])
