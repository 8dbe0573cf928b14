from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.train.small import emotion_rows, tiny, write_tsv

from mezzo.errors import DataError
from mezzo.train import TrainConfig
from mezzo.train.data import clean, load_corpus
from mezzo.train.text_files import Row, read_reviews

ROWS = st.lists(
    st.builds(Row, st.sampled_from(["", " ", "a", "a ", " b", "c"]), st.sampled_from(["x", "y"])), max_size=12
)


@given(ROWS)
def test_cleaning_keeps_each_text_with_one_label_once(rows: list[Row]) -> None:
    kept, dropped = clean(rows)
    labels = {
        text: {row.label for row in rows if row.text.strip() == text} for text in {row.text.strip() for row in rows}
    }
    assert {row.text: {row.label} for row in kept} == {t: found for t, found in labels.items() if t and len(found) == 1}
    assert len({row.text for row in kept}) == len(kept)
    assert len(kept) + sum(dropped.values()) == len(rows)


def test_no_text_of_the_reviews_is_on_two_sides_and_none_is_lost() -> None:
    corpus = load_corpus(TrainConfig())
    parts = [{row.text for row in part} for part in (corpus.train, corpus.dev, corpus.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(corpus.train) + len(corpus.dev) + len(corpus.test)
    lines = {
        label: {r.text.strip() for r in read_reviews() if r.label == label} - {""} for label in ("positive", "negative")
    }
    assert set.union(*parts) == lines["positive"] ^ lines["negative"]
    assert len(corpus.test) >= 2000
    assert all(row.text in lines[row.label] for row in corpus.test)


def test_the_split_does_not_depend_on_the_seed_of_the_run() -> None:
    first, second = (load_corpus(TrainConfig(seed=seed, limit=limit)) for seed, limit in ((0, 0), (1, 50)))
    assert first.test == second.test
    assert first.dev == second.dev
    assert first.train[:50] == second.train


def test_given_dev_and_test_files_are_taken_out_of_training(tmp_path: Path) -> None:
    rows = emotion_rows(60)
    data, dev, test = (
        write_tsv(tmp_path / f"{n}.tsv", r) for n, r in (("a", rows), ("d", rows[:12]), ("t", rows[6:18]))
    )
    corpus = load_corpus(tiny(data, tmp_path, dev_data=dev, test_data=test))
    texts = [[(row.text, row.label) for row in part] for part in (corpus.dev, corpus.test)]
    assert texts == [rows[:6], rows[6:18]]
    assert sorted((row.text, row.label) for row in corpus.train) == sorted(rows[18:])


def test_the_fingerprint_sees_a_changed_label_a_moved_row_and_a_moved_part(tmp_path: Path) -> None:
    rows = emotion_rows(60)
    flipped = [(rows[0][0], rows[1][1]), *rows[1:]]
    swapped = [rows[1], rows[0], *rows[2:]]
    found = {
        load_corpus(tiny(write_tsv(tmp_path / "a.tsv", r), tmp_path, limit=limit)).fingerprint
        for r, limit in ((rows, 0), (flipped, 0), (swapped, 0), (rows, 20))
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")] + [(f"t{i}", "x") for i in range(20)], "has the label 'x', and a classifier needs two"),
        ([("a", "x"), ("a", "y")], "no text with one label"),
        ([("", "x"), (" ", "y")], "no text with one label"),
        ([("a", "x"), ("b", "y")], "too small: no row is left for dev. Give more rows, or --dev-data."),
    ],
)  # fmt: skip
def test_data_that_cannot_teach_is_refused(rows: list[tuple[str, str]], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        load_corpus(tiny(write_tsv(tmp_path / "a.tsv", rows), tmp_path))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"dev_data": "a"}, "every row of --data stands in --dev-data too."),
        ({"dev_data": "a", "test_data": "b"}, "every row of --data stands in --dev-data or --test-data too."),
        ({"dev_data": "b", "test_data": "b"}, "every row of --dev-data stands in --test-data too."),
    ],
)  # fmt: skip
def test_a_file_that_another_takes_all_rows_of_is_said(files: dict[str, str], words: str, tmp_path: Path) -> None:
    rows = emotion_rows(60)
    paths = {"a": write_tsv(tmp_path / "a.tsv", rows), "b": write_tsv(tmp_path / "b.tsv", rows[:5])}
    with pytest.raises(DataError) as refusal:
        load_corpus(tiny(paths["a"], tmp_path, **{part: paths[name] for part, name in files.items()}))
    assert str(refusal.value) == f"{words} Write files that have no row in common."


def test_a_row_that_a_share_takes_leaves_none_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is too small: no row is left for train. Give more rows.$"):
        load_corpus(tiny(write_tsv(tmp_path / "a.tsv", [("a", "x")]), tmp_path, dev_share=0.8))


def test_a_label_that_only_the_test_rows_have_is_refused(tmp_path: Path) -> None:
    rows = emotion_rows(60)
    data, test = write_tsv(tmp_path / "a.tsv", rows), write_tsv(tmp_path / "t.tsv", [("ok", "joy"), ("odd", "joyy")])
    with pytest.raises(
        DataError, match=r"test rows have the label 'joyy', which no training row has\. Did you mean 'joy'"
    ):
        load_corpus(tiny(data, tmp_path, test_data=test))
