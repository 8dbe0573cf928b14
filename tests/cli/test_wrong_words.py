"""Words of the wrong kind on the command line: one sentence that says what to write instead, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.test_bad_input import refused
from torch import nn

import mezzo
from mezzo.cli import main
from mezzo.errors import ConfigError
from mezzo.train import TrainConfig
from mezzo.train.predictor import Predictor


@pytest.mark.parametrize("command", ["demo", "bench recipe --no-check"])
@pytest.mark.parametrize("beyond", ["", "further"])
def test_a_file_is_no_folder_for_results(
    command: str, beyond: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    said = refused(capsys, *command.split(), "--device", "cpu", "--out", str(file / beyond))
    assert f"--out {file / beyond}: " in said and "Name a folder that can be" in said
    assert file.read_text() == "mine"


@pytest.mark.parametrize("words", [[], ["bash", "zsh"]])
def test_completion_of_no_shell_is_said_on_standard_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "bash, zsh" in refused(capsys, "completion", *words)
    assert capsys.readouterr().out == ""


def test_an_empty_policy_is_no_policy_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown preset ''" in refused(capsys, "policy", "show", "")


@pytest.mark.parametrize(
    "command", ["policy show", "policy diff fp32", "predict --model . --policy", "train --data no.tsv --policy"]
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("folder", "is a folder"),
        ("file", "is a file whose name does not end in .toml"),
        ("no/where.tml", "is a path where nothing is"),
    ],
)
def test_a_path_is_no_policy_unless_it_is_that_of_a_toml_file(
    command: str,
    name: str,
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_bytes(b"\xb0\0")
    said = refused(capsys, *command.split(), name)
    assert f"'{name}' {kind}, and a policy is a text such as 'bf16, output=fp32' or the path of a .toml file." in said


@pytest.mark.parametrize("content", ["", "# compute = 'bf16'\n"])
def test_a_policy_file_that_says_nothing_is_no_fp32(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.toml").write_text(content)
    said = refused(capsys, "policy", "show", str(tmp_path / "p.toml"))
    assert "sets nothing. Write preset = 'fp32' in it if fp32 is meant." in said


@pytest.mark.parametrize("policy", ["fp32", "fp32, guard.patience=3", "32-true"])
def test_amp_asked_for_beside_a_policy_without_it_is_a_contradiction(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--data", "no.tsv", "--out", str(tmp_path), "--policy", policy]
    assert f"--amp and --policy {policy} contradict each other" in refused(capsys, *words, "--amp")
    for last in ([], ["--no-amp"], ["--amp", "--no-amp"]):
        assert "no.tsv does not exist" in refused(capsys, *words, *last)
    for mixed in ("auto", "bf16", "fp32, compute=bf16"):
        assert "no.tsv does not exist" in refused(capsys, *words, "--amp", "--policy", mixed)


@pytest.mark.parametrize(
    ("words", "idle", "given"),
    [
        ("--model m --hidden 256", "--hidden", "--model"),
        ("--dropout=0 --model m", "--dropout", "--model"),
        ("--model=m --vocab_size 900", "--vocab-size", "--model"),
        ("--dev-data d.tsv --dev-share 0.2", "--dev-share", "--dev-data"),
        ("--test-data t.tsv --test-share 0.2", "--test-share", "--test-data"),
    ],
)
def test_an_option_that_another_leaves_without_effect_is_a_contradiction(
    words: str, idle: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "train", "--data", "no.tsv", "--out", str(tmp_path), *words.split())
    assert f"{idle} has no effect beside {given}. Leave one of them out." in said
    for fine in ("--model m --token-dropout 0.1", "--dev-data d.tsv --test-data t.tsv --dev-share 0 --test-share 0"):
        assert "does not exist" in refused(capsys, "train", "--data", "no.tsv", "--out", str(tmp_path), *fine.split())


def test_an_option_without_its_value_is_said_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--out"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "--out" in said and "mezzo train --help" in said


def test_a_record_that_is_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record").touch()
    said = refused(capsys, "replay", str(tmp_path / "record"), "--step", "0", "--model", "fn:build")
    assert "it is a file" in said


def test_a_folder_is_no_label_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.tsv").write_text("text\tlabel\na\tb\n")
    words = "train", "--data", str(tmp_path / "rows.tsv"), "--label-map", str(tmp_path), "--out", str(tmp_path / "out")
    assert "is a folder. Write a path to a .json, .tsv file in it." in refused(capsys, *words)


def test_a_folder_without_a_model_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for words in (["predict"], ["train", "--out", str(tmp_path / "out")]):
        said = refused(capsys, *words, "--model", str(tmp_path / "empty"))
        assert "the folder holds no model: it has no config.json" in said


def test_lengths_and_vocabularies_without_room_for_a_word(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size=5 leaves no entry beside the five marks; write 6 or more"):
        TrainConfig(vocab_size=5)
    with pytest.raises(ConfigError, match="max_length=2 leaves no token beside the two marks; write 3 or more, or 0"):
        Predictor(tmp_path, max_length=2)


FUNCTIONS = """
import torch
def needs(x): return x
def swapped(): return torch.zeros(1), torch.nn.Linear(1, 1)
def alone(): return torch.nn.Linear(1, 1)
def build(): return (m := torch.nn.Linear(1, 1)), torch.optim.SGD(m.parameters()), lambda model, batch: model(batch).sum()
class Model:
    def __init__(self, x): pass
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("needs", "is called without arguments, and cannot be: missing a required argument: 'x'. Give them defaults."),
        ("Model", "is called without arguments, and cannot be: missing a required argument: 'x'. Give them defaults."),
        ("swapped", "returned (Tensor, Linear); return (model, batch) or (model, batch, loss_fn)."),
        ("alone", "returned Linear; return (model, batch) or (model, batch, loss_fn)."),
        ("build", "returned (Linear, SGD, function); return (model, batch) or (model, batch, loss_fn)."),
    ],
)
def test_a_function_that_makes_no_model(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fn.py").write_text(FUNCTIONS)
    assert said in refused(capsys, "doctor", "--model", f"{tmp_path / 'fn.py'}:{name}")


@pytest.mark.parametrize("command", ["doctor", "replay run --step 1"])
def test_a_policy_is_read_before_a_model_is_made(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters()), "fp32")
    with mezzo.record(amp, tmp_path / "run") as recorder:
        for batch in recorder.batches(torch.ones(2, 2, 2)):
            amp.backward(model(batch).sum())
            amp.step()
            amp.zero_grad()
    (tmp_path / "fn.py").write_text("def build(): raise SystemExit('it was made')")
    monkeypatch.chdir(tmp_path)
    assert "unknown preset 'bf61'" in refused(capsys, *command.split(), "--model", "fn.py:build", "--policy", "bf61")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("explain", "doctor --model MODULE:FUNCTION"), ("trace", "doctor script.py"), ("why", "policy why"), ("launch", "train --nproc N")],
)  # fmt: skip
def test_a_tool_that_has_no_command_of_its_name(name: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err == f"mezzo: unknown command '{name}'. Write `mezzo {meant}`.\n"
