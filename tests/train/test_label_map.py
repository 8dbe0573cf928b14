"""A label map gives numbered or foreign labels their names, in its own order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.train.small import emotion_rows, tiny, write_tsv

from mezzo.errors import DataError
from mezzo.train.data import load_corpus, read_label_map

NAMES = ["joy", "love", "anger", "fear", "sadness", "surprise"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tsv(tmp_path_factory.mktemp("data") / "emotions.tsv", emotion_rows(120))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.json", json.dumps(NAMES)),
        ("map.json", json.dumps({name: index for index, name in reversed(list(enumerate(NAMES)))})),
        ("map.json", json.dumps({str(index): name for index, name in enumerate(NAMES)})),
        ("map.tsv", "".join(f"{index}\t{name}\n" for index, name in enumerate(NAMES))),
    ],
)
def test_a_map_names_numbered_labels_in_its_own_order(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    numbered = [(words, str(NAMES.index(label))) for words, label in emotion_rows(120)]
    path = write_tsv(tmp_path / "rows.tsv", numbered)
    corpus = load_corpus(tiny(path, tmp_path / "out", label_map=tmp_path / name))
    assert corpus.labels == tuple(NAMES)
    by_text = dict(emotion_rows(120))
    assert all(row.label == by_text[row.text] for row in (*corpus.train, *corpus.dev, *corpus.test))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "is none of"),
        ('["one"]', "names 1 class"),
        ('{"a": 0, "b": 2}', "must be 0, 1, 2"),
    ],
)
def test_a_bad_map_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(DataError, match=words):
        read_label_map(tmp_path / "map.json")


def test_a_label_that_the_map_lacks_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('["joy", "anger"]')
    with pytest.raises(DataError, match="which the label map lacks"):
        load_corpus(tiny(data, tmp_path / "out", label_map=tmp_path / "map.json"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope.json", "does not exist. Write a path to a .json, .tsv file."),
        (".", "is a folder. Write a path to a .json, .tsv file in it."),
    ],
)
def test_a_map_that_cannot_be_read_is_called_one(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        read_label_map(tmp_path / name)
    assert str(refusal.value) == f"the label map {tmp_path / name} {said}"
