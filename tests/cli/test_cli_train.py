from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.train.small import emotion_rows, write_tsv

from mezzo.cli import main
from mezzo.cli.train import parse
from mezzo.train import TrainConfig

SMALL = "--vocab-size 200 --layers 1 --hidden 16 --heads 2 --max-length 16 --batch-size 16 --epochs 1".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tsv(tmp_path_factory.mktemp("data") / "emotions.tsv", emotion_rows(120))


def test_every_field_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "--amp, --no-amp" in shown


@pytest.mark.parametrize("words", ["--max-norm none", "--max-norm NONE", "--max_norm None", "--max-norm=none"])
def test_none_is_taken_in_any_case(words: str) -> None:
    assert parse([*words.split(), "--data", "none"])[0] == TrainConfig(max_norm=None, data="none")


def test_options_become_the_config() -> None:
    line = (
        "--data a.tsv --no-amp --lr 2e-5 --policy bf16 --max-length 64 --out here --overwrite --dev-data d.csv --json"
    )
    config, as_json = parse(line.split())
    assert config == TrainConfig(
        data="a.tsv", amp=False, lr=2e-5, policy="bf16", max_length=64, out=Path("here"), overwrite=True, dev_data=Path("d.csv")
    )  # fmt: skip
    assert as_json
    assert parse([]) == (TrainConfig(), False)


def test_it_trains_and_reports(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["train", "--data", str(data), "--out", str(out), *SMALL]) == 0
    printed = capsys.readouterr()
    result = json.loads((out / "result.json").read_text())
    assert result["report_text"] in printed.out
    assert f"test accuracy   {result['accuracy']:.4f}" in printed.out
    assert str(out / "best") in printed.out
    assert "dev accuracy" in printed.err  # where nobody watches, a line an evaluation
    assert main(["train", "--resume", "--out", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {name: again[name] for name in again if name != "peak_memory_bytes"} == {
        name: result[name] for name in result if name != "peak_memory_bytes"
    }
    assert main(["train", "--resume", "--out", str(out), "--epochs", "2"]) == 2
    assert "these options are not the same: epochs=2 (was 1)" in capsys.readouterr().err


def test_a_run_that_was_not_evaluated_says_so(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "out"), *SMALL, "--no-evaluate"]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["dev_accuracy"] is None
    assert f"last model      update {result['best_step']}, not evaluated\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--data", "nix.tsv"], "the data file nix.tsv does not exist"),
        (["--policy", "bf61"], "Did you mean 'bf16'"),
        (["--policy", "bf16, *.nrom*=fp32"], "no module of the model has a name or class"),
        (["--resume"], "there is no checkpoint"),
        (["--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["--label-column", "emotion"], "has no column 'emotion'"),
        (["--device", "gpu"], "device='gpu' cannot be used here"),
        (["--nproc", "-1"], "--nproc -1: give a number of processes of at least 1, or leave it out to start none."),
        (
            ["--seed", "99999999999999999999999"],
            "seed=99999999999999999999999 must be a whole number of at most 64 bits",
        ),
        (["--seed", "99999999999999"], "seed=99999999999999 must be below 2^44"),
        (["--lr", "1e400"], "lr=inf must be positive and finite"),
        (["--weight-decay", "nan"], "weight_decay=nan must not be negative, inf or nan"),
        (["--label-map", "nope.json"], "the label map nope.json does not exist. Write a path to a .json, .tsv file."),
        (["--nproc", "3"], "batch_size=16 is the batch of all 3 ranks together"),
        (["--max-restarts", "1"], "--nproc was left out"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], complaint: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "out"), *SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mezzo train: ")
    assert complaint in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_default_is_shown_with_all_its_digits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "0.142857" in shown and "0.14285714" not in shown and parse([])[0].test_share == 1 / 7


def test_a_rank_left_in_the_environment_hides_no_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a batch system's shell, without ranks to go with it: the run trained, and printed nothing."""
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "out"), *SMALL]) == 0
    assert "test accuracy" in capsys.readouterr().out
