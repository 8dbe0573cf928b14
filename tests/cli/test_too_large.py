"""Sizes that a machine has no memory for: one sentence and exit code 2, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cli.test_bad_input import refused
from tests.train.small import emotion_rows, write_tsv

from mezzo.cli import main
from mezzo.train.model import train_tokenizer

SMALL = "--vocab-size 200 --layers 1 --hidden 8 --heads 2 --max-length 16 --epochs 1 --device cpu".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tsv(tmp_path_factory.mktemp("data") / "emotions.tsv", emotion_rows(600))


@pytest.mark.parametrize(
    "words",
    ["--hidden 4000000000 --intermediate 8", "--layers 1000000000000", "--intermediate 99999999999999", "--max-length 99999999999999"],
)  # fmt: skip
def test_a_model_larger_than_the_machine_is_refused_before_it_is_made(
    words: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "train", "--data", str(data), "--out", str(tmp_path / "out"), *SMALL, *words.split())
    assert "GiB of weights, and this machine has" in said and "Write a smaller" in said
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_has_no_more_entries_than_its_texts_give() -> None:
    texts = [text for text, _ in emotion_rows(60)]
    assert train_tokenizer(texts, 10**12, 16).get_vocab() == train_tokenizer(texts, 10**5, 16).get_vocab()


@pytest.mark.parametrize("take", [lambda: torch.empty(2**55), lambda: bytearray(2**60)])
def test_memory_that_runs_out_is_one_sentence(
    take: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mezzo.cli.train.train", lambda config: take())
    said = refused(capsys, "train")
    assert said.startswith("mezzo train: memory ran out: ") and "a smaller --batch-size" in said


def test_another_error_is_not_called_one_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.cli.train.train", lambda config: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        main(["train"])
