"""Files and words that a hostile or clumsy person hands to the commands: one sentence and exit code 2, and nothing is lost."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small import trained_in, words

from mezzo.cli import main
from mezzo.errors import ConfigError
from mezzo.train import TrainConfig
from mezzo.train.predictor import Predictor


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return trained_in(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def again(trained: TrainConfig, tmp_path: Path) -> TrainConfig:
    """A copy of a run that may be damaged."""
    shutil.copytree(trained.out, tmp_path / "out")
    return trained.replace(out=tmp_path / "out", epochs=1)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(list(argv)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mezzo {argv[0]}: ") and said.count("\n") == 1, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "\\ud83d", "label": "a"}', "line 1 of"),
        ('{"text": "x", "label": "\\udc00"}', "half of a character"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": "a", "label": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_rows_that_are_no_text(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    out = str(tmp_path / "out")
    assert said in refused(capsys, "train", "--data", str(tmp_path / "rows.jsonl"), "--out", out)


def test_a_policy_file_nested_too_deeply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.toml").write_text("a = " + "[" * 100_000)
    assert "p.toml" in refused(capsys, "policy", "show", str(tmp_path / "p.toml"))


@pytest.mark.parametrize("name", ["\0", "x" * 300, "a/" + "漢" * 100])
@pytest.mark.parametrize("option", ["--out", "--data", "--dev-data", "--model", "--label-map"])
def test_names_that_no_file_can_have(option: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "train", option, name)


@pytest.mark.parametrize("words", ["--out=", "--out ", "--model ", "--label-map="])
def test_an_empty_path_is_not_the_current_folder(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "was given an empty text" in refused(capsys, "train", "--data", "nowhere.tsv", *words.split(" "))
    with pytest.raises(ConfigError, match="'' for out, which no file can be called: it is empty"):
        TrainConfig(out="")  # type: ignore[arg-type]


def test_an_old_word_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in (
        ("parts 2", "micro-batches N"),
        ("fp16", "policy fp16"),
        ("bf16=True", "policy bf16"),
        ("learning_rate 1", "lr RATE"),
        ("gradient-accumulation-steps 2", "micro-batches N, which share one --batch-size"),
        ("loss-scale 128", "policy fp16,scaling=N"),
        ("gradient_clip_val=1", "max-norm NORM"),
        ("devices 2", "nproc N"),
    ):
        said = refused(capsys, "train", *f"--{old}".split())
        assert f"--{old.split()[0].partition('=')[0]} is called --{new.split()[0]} here: write --{new}." in said


@pytest.mark.parametrize("length", ["-5", "2"])
def test_a_length_that_is_none(trained: TrainConfig, length: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "predict", "--model", str(trained.out), "--max-length", length)


def test_a_model_of_pickles_is_refused_and_runs_nothing(
    trained: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    folder = tmp_path / "model"
    shutil.copytree(trained.out / "best", folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Planted()))
    refused(capsys, "predict", "--model", str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["predict", "train"])
def test_a_file_is_no_model(command: str, trained: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    file = trained.out / "best" / "model.safetensors"
    assert f"it is a file, in the folder '{file.parent}'." in refused(capsys, command, "--model", str(file))


@pytest.mark.parametrize("name", ["nope", "./nope", "some/where/else"])
def test_a_mistyped_model_is_said_at_once(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://127.0.0.1:9")  # nobody answers there
    monkeypatch.setattr("mezzo.train.model.getproxies", dict)
    asked: list[Any] = []
    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda *given: (asked.append(given), connect(*given)))
    assert "no such folder" in refused(capsys, "predict", "--model", name)
    assert len(asked) <= 1  # the hub's client asks again and again, for about 50 s


@pytest.mark.parametrize(
    "damage", ["{", "[1]\n", '{"kind": "update"}\n', '{"step": 1}\n', "[" * 100_000 + "\n", "\udcff"]
)
def test_a_damaged_record_of_a_run(again: TrainConfig, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = again.out / "metrics.jsonl"
    path.write_bytes((damage + "\n").encode("utf-8", "surrogateescape") + path.read_bytes())
    assert "metrics.jsonl is damaged" in refused(capsys, "train", *words(again), "--resume")


@pytest.mark.parametrize(
    "field", [("epochs", "3"), ("lr", "fast"), ("data", 5), ("amp", 1), ("out", None), ("heads", 2.5), ("seed", True), ("parts", 2)]
)  # fmt: skip
def test_wrong_types_in_a_configuration(
    again: TrainConfig, field: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = again.out / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field[0]: field[1]}))
    assert field[0] in refused(capsys, "train", "--resume", "--out", str(again.out))


KEYS = ["launch", "config", "labels", "fingerprint", "tokenizer", "position", "step", "schedule", "average", "format"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["missing", "number"])
def test_checkpoints_that_lack_a_part(
    again: TrainConfig, key: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = again.out / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    if kind == "missing":
        del state[key]
    else:
        state[key] = 17
    torch.save(state, path)
    if kind == "number" and key in ("launch", "average", "tokenizer"):  # a run without these parts does not read them
        return
    assert "checkpoint" in refused(capsys, "train", *words(again), "--resume")


@pytest.mark.parametrize(
    "inner", [("position", "step"), ("schedule", "last_epoch"), ("step", "model"), ("step", "optimizers")]
)
def test_checkpoints_that_lack_a_part_of_a_part(
    again: TrainConfig, inner: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = again.out / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state[inner[0]] = {"a key": "that nobody wrote"} if inner[0] == "position" else state[inner[0]]
    state[inner[0]].pop(inner[1], None)
    torch.save(state, path)
    if inner[0] != "schedule":  # torch's schedulers take what they are given
        assert "checkpoint" in refused(capsys, "train", *words(again), "--resume")


@pytest.mark.parametrize(
    "part", [{"final_loss": torch.zeros(())}, {"seconds": "1"}, {"step": 2.5}, {"step": -5}, {"best_accuracy": None}]
)
def test_a_checkpoint_at_no_position_of_a_run(
    again: TrainConfig, part: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    """It trained to its end, and then the result could not be written."""
    path = again.out / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "position": {**state["position"], **part}}, path)
    assert f"{path} is damaged" in refused(capsys, "train", *words(again), "--resume")


def test_a_tab_in_a_label_keeps_the_columns(
    trained: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.out / "best", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    saved = json.loads(path.read_text())
    saved["id2label"] = {index: f"{name}\t\\x\n" for index, name in saved["id2label"].items()}
    saved["label2id"] = {name: int(index) for index, name in saved["id2label"].items()}
    path.write_text(json.dumps(saved))
    (tmp_path / "lines.txt").write_text("happy delight\n")
    assert main(["predict", "--model", str(tmp_path / "model"), str(tmp_path / "lines.txt")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    label, probability = line.split("\t")
    assert label.endswith("\\t\\\\x\\n") and 0 < float(probability) <= 1
    found = Predictor(str(tmp_path / "model"))(["happy delight"])[0]
    assert found is not None and found.label.endswith("\t\\x\n")


@pytest.mark.parametrize(("words", "closed"), [("policy -h", ""), ("policy ops", ">&-")])
def test_a_stream_that_takes_no_such_text_or_is_closed(words: str, closed: str) -> None:
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = f"{sys.executable} -m mezzo {words} {closed}"
    ended = subprocess.run(["sh", "-c", command], env=plain, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("folder", "held"), [("nothing", "there is no such folder"), (".", "it holds no step")])
def test_a_replay_looks_at_its_folder_before_it_runs_the_model(
    folder: str, held: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "makes.py").write_text("raise SystemError('ran')\n")
    words = ["--step", "1", "--model", f"{tmp_path / 'makes.py'}:build"]
    assert held in refused(capsys, "replay", str(tmp_path / folder), *words)


MEETING = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "2"}, "RANK is 2 in the environment, and WORLD_SIZE 2, so ranks are 0 to 1"),
        ({"RANK": None}, "environment variable RANK expected, but not set"),
        ({"MASTER_ADDR": None}, "environment variable MASTER_ADDR expected"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
    ],
)
def test_ranks_that_the_environment_does_not_tell(
    changed: dict[str, str | None], said: str, again: TrainConfig, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in {**MEETING, **changed}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    found = refused(capsys, "train", *words(again), "--overwrite")
    assert said in found and "or unset WORLD_SIZE and RANK to train in one process." in found


def test_a_model_alone_asks_for_no_rank(trained: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "x")
    assert Predictor(trained.out)(["happy"])[0] is not None
