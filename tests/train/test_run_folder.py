"""What lies in `--out` before a training: nothing that is not a run's own is written over, and a run names its best model."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from tests.messages import message_of
from tests.train.small import metrics, trained_in

from mezzo.errors import CheckpointError, ConfigError
from mezzo.train import Predictor, TrainConfig, run
from mezzo.train.config import RunFolder
from mezzo.train.metrics import read_metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return trained_in(tmp_path_factory.mktemp("trained"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "kind", ["a model", "best", "best.partial", "metrics.jsonl", "curves.png", "result.json", "checkpoint.pt", "a damaged run"]
)  # fmt: skip
def test_what_no_run_wrote_is_not_replaced(kind: str, overwrite: bool, trained: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "a model":
        shutil.copytree(trained.out / "best", out)
    elif kind == "a damaged run":
        shutil.copytree(trained.out, out)
        (out / "config.json").write_text("{")
    else:
        (out / kind).mkdir(parents=True)
        (out / kind / "weights").write_text("mine")
        if "." in kind.removesuffix(".partial"):
            shutil.rmtree(out / kind)
            (out / kind).write_text("mine")
    before = contents(out)
    with pytest.raises(ConfigError, match=r"training would replace .* Write --out with a new folder"):
        run(trained.replace(out=out, overwrite=overwrite))
    assert contents(out) == before


@pytest.mark.parametrize(
    "name", ["best", "best.partial", "metrics.jsonl", "metrics.jsonl.partial", "curves.png", "checkpoint.pt", "result.json"]
)  # fmt: skip
@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_what_training_could_not_write_over_is_told_before_it_begins(
    name: str, how: str, trained: TrainConfig, tmp_path: Path
) -> None:
    """The checkpoint of the run that is there was gone by then, or an epoch."""
    out = tmp_path / "out"
    shutil.copytree(trained.out, out, ignore=lambda *_: {name})
    (out / name).write_text("mine") if name.startswith("best") else (out / name).mkdir()
    before = contents(out)
    with pytest.raises(ConfigError, match=rf"{out} holds {name}, a folder where training writes a file"):
        run(trained.replace(out=out, **{how: True}))
    assert contents(out) == before and (out / name).is_dir() is not name.startswith("best")


def test_a_folder_with_other_files_takes_a_run(trained: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    run(trained.replace(out=tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "best").is_dir()


def test_a_run_is_a_model_to_start_from(trained: TrainConfig, tmp_path: Path) -> None:
    results = [
        run(trained.replace(model=str(model), out=tmp_path / name))
        for name, model in (("run", trained.out), ("best", trained.out / "best"))
    ]
    assert results[0].final_loss == results[1].final_loss


def test_a_run_without_an_evaluation_has_no_model_yet(trained: TrainConfig, tmp_path: Path) -> None:
    shutil.copytree(trained.out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "best")
    with pytest.raises(ConfigError, match="has no model yet"):
        run(trained.replace(model=str(tmp_path / "run"), out=tmp_path / "out"))


@pytest.mark.parametrize("inside", ["", "best"])
def test_a_run_does_not_give_up_the_model_that_it_starts_from(
    inside: str, trained: TrainConfig, tmp_path: Path
) -> None:
    shutil.copytree(trained.out, tmp_path / "run")
    before = contents(tmp_path / "run")
    model = str(tmp_path / "run" / inside)
    with pytest.raises(ConfigError, match="would give up the model that it starts from"):
        run(trained.replace(model=model, out=tmp_path / "run", overwrite=True))
    assert contents(tmp_path / "run") == before


def test_a_model_with_a_folder_called_best_is_itself(trained: TrainConfig, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(trained.out / "best", model)
    shutil.copytree(trained.out / "best", model / "best")
    saved = json.loads((model / "config.json").read_text())
    saved["id2label"] = {index: f"own {name}" for index, name in saved["id2label"].items()}
    saved["label2id"] = {name: int(index) for index, name in saved["id2label"].items()}
    (model / "config.json").write_text(json.dumps(saved))
    (found,) = Predictor(model)(["happy delight"])
    assert found is not None and found.label.startswith("own ")


@pytest.mark.parametrize(
    ("line", "content"),
    [
        (1, b"{broken"), (2, b"\xff"), (3, b"[1]"), (2, b"[" * 100_000), (1, b'{"kind": "update", "step": 1}'),
        (3, b'{"kind": "update", "step": "x", "loss": 1.0, "scale": 1.0, "applied": true}'),
        (1, b'{"kind": "evaluation", "step": 1, "loss": "x", "accuracy": 1.0}'),
    ],
)  # fmt: skip
def test_a_damaged_record_is_named_with_its_line(
    line: int, content: bytes, trained: TrainConfig, tmp_path: Path
) -> None:
    lines = (trained.out / "metrics.jsonl").read_bytes().split(b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines[: line - 1], content, *lines[line - 1 :]]))
    assert message_of(CheckpointError, read_metrics, tmp_path / "metrics.jsonl") == (
        f"{tmp_path / 'metrics.jsonl'} is damaged: line {line} is no record of an update or an evaluation. "
        "Remove it, and the run goes on with a new one."
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{\n "data": 5,\n x}', "Expecting property name enclosed in double quotes: line 3 column 2 (char 15)"),
        (b'{\n\n"data": "\xff"}', "line 3 is not UTF-8"),
        (b"[]", "it is no JSON object"),
        (b'{"epochs": "3"}', "epochs="),
        (None, "Is a directory"),
    ],
)  # fmt: skip
def test_damaged_options_are_told_what_to_do_and_stop_no_prediction(
    content: bytes | None, why: str, trained: TrainConfig, tmp_path: Path
) -> None:
    shutil.copytree(trained.out, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        TrainConfig.load(path)
    assert str(refusal.value).startswith(f"{path} holds no training configuration: {why}")
    assert str(refusal.value).endswith(
        ". Bring back a whole one, or remove it and write the options of the run beside --resume."
    )
    if why != "epochs=":
        assert Predictor(tmp_path / "out")(["happy"]) == Predictor(trained.out)(["happy"])
    shutil.rmtree(path) if content is None else path.unlink()
    assert run(trained.replace(out=tmp_path / "out", resume=True)).best_step > 0


def test_a_best_model_that_is_gone_is_told_before_training_goes_on(trained: TrainConfig, tmp_path: Path) -> None:
    """The hub was asked for a model of the folder's name."""
    shutil.copytree(trained.out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "best")
    assert message_of(CheckpointError, run, trained.replace(out=tmp_path / "out", resume=True)) == (
        f"the best model of the run, that of update {metrics(trained.out)[-1]['step']}, is not in {tmp_path / 'out' / 'best'}. "
        "Bring it back, or start again with --overwrite."
    )


def _hold(out: Path, is_held: Event, end: Event) -> None:
    with RunFolder(out).held():
        is_held.set()
        end.wait(60)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other locks")
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_takes_one_training_at_a_time(resume: bool, trained: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained.out, out)
    config, before = trained.replace(out=out, resume=resume, overwrite=not resume), contents(out)
    fork = multiprocessing.get_context("fork")
    is_held, end = fork.Event(), fork.Event()
    other = fork.Process(target=_hold, args=(out, is_held, end))
    other.start()
    assert is_held.wait(60)
    with pytest.raises(ConfigError, match=rf"another process is training into {out}\. Wait .* another --out"):
        run(config)
    assert contents(out) == before
    end.set()
    other.join()
    assert run(config).best_step == json.loads((trained.out / "result.json").read_text())["best_step"]


def test_a_run_that_is_at_its_end_stays_that_of_its_policy(
    trained: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.out, tmp_path / "out")
    again = trained.replace(out=tmp_path / "out", resume=True)
    before, config = json.loads((trained.out / "result.json").read_text()), (tmp_path / "out" / "config.json")
    for changed in ({"policy": "fp16"}, {"amp": False}):
        result = run(again.replace(**changed))
        assert (result.policy, result.report) == (before["policy"], before["report"])
        asked = again.replace(**changed).chosen_policy
        assert f"leaves none for the policy {asked}: the result is that of bf16" in capsys.readouterr().err
        assert (json.loads(config.read_text())["policy"], json.loads(config.read_text())["amp"]) == ("bf16", True)
    run(again)
    assert "was the last" not in capsys.readouterr().err
