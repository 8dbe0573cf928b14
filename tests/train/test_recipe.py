"""The options by which `mezzo train` is the published training script: rate, labels, split, batch, evaluation, output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.distributed.ranks import run as on_ranks
from tests.train.rank_jobs import train
from tests.train.small import emotion_rows, metrics, tiny, write_tsv

from mezzo.errors import ConfigError
from mezzo.train import TrainConfig, run
from mezzo.train.data import clean, load_corpus
from mezzo.train.text_files import Row

NAMES = ["joy", "love", "anger", "fear", "sadness", "surprise"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tsv(tmp_path_factory.mktemp("data") / "emotions.tsv", emotion_rows(120))


# --- labels -----------------------------------------------------------------------------------------------------------


def test_labels_are_stripped_and_empty_ones_dropped_and_counted() -> None:
    rows = [Row("a", "x"), Row("b", "x "), Row("c", ""), Row("d", "  "), Row("e", "y")]
    kept, dropped = clean(rows)
    assert kept == [Row("a", "x"), Row("b", "x"), Row("e", "y")]
    assert (dropped["unlabelled"], dropped["respelled"]) == (2, 2)


# --- split, batch, evaluation -----------------------------------------------------------------------------------------


def test_the_split_of_the_script_is_two_parts(data: Path, tmp_path: Path) -> None:
    corpus = load_corpus(tiny(data, tmp_path / "out", rows=100, dev_share=0.08, test_share=0.0))
    assert (len(corpus.train), len(corpus.dev)) == (92, 8)
    assert corpus.test == corpus.dev
    assert "92 rows to learn from, 8 dev, 8 test" in corpus.summary


def test_a_batch_of_each_rank_is_the_batch_of_all(data: Path, tmp_path: Path) -> None:
    one = tiny(data, tmp_path / "one", batch_size=16, micro_batches=2, epochs=1)
    two = tiny(data, tmp_path / "two", batch_size=8, per_rank=True, epochs=1)
    (wanted,) = on_ranks(1, train, one)
    assert on_ranks(2, train, two) == [wanted, wanted]
    assert metrics(two.out) == metrics(one.out)
    comm = json.loads((two.out / "result.json").read_text())["comm"]
    assert set(comm["reductions"]) == {"fp32"} and comm["payload_bytes"] == comm["wire_bytes"] > 0  # a ring of two


def test_without_evaluation_the_last_weights_are_kept(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path / "out", evaluate=False)
    result = run(config)
    assert result.dev_accuracy is None and result.best_step == result.applied_steps
    assert {record["kind"] for record in metrics(config.out)} == {"update"}
    assert (config.out / "curves.png").exists()
    assert json.loads((config.out / "result.json").read_text())["dev_accuracy"] is None


def test_dropped_rows_are_said_when_training_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = emotion_rows(90)
    path = write_tsv(tmp_path / "rows.tsv", [*rows, *rows[:7], ("", "joy"), ("no label", "")])
    run(tiny(path, tmp_path / "out", epochs=1, log_every=2, policy="bf16", amp=False))
    said = capsys.readouterr().err
    assert "dropped: 1 empty, 1 unlabelled, 7 duplicate; fp32 on cpu" in said
    assert "update 1/" in said and "smoothed" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "lienar"}, "Did you mean 'linear'"),
        ({"schedule": "constant", "warmup": 0.1}, "--schedule constant_with_warmup"),
        ({"dev_share": 0.6, "test_share": 0.5}, "leave no row"),
        ({"dev_share": 0.0}, "--dev-data"),
        ({"max_norm": 0.0}, "must be positive"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig().replace(**options)


def test_a_tracker_gets_the_numbers(data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(data, tmp_path / "out", epochs=1, tracker="tensorboard")
    run(config)
    events = EventAccumulator(str(config.out / "tensorboard"))
    events.Reload()
    losses = [record["loss"] for record in metrics(config.out) if record["kind"] == "update"]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)
    assert len(events.Scalars("dev/accuracy")) == 1
