"""What lies in `--out` before a training: nothing that is not a run's own is written over, and a run names its best model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.train.small import emotion_rows, tiny, write_tsv

from mezzo.errors import ConfigError
from mezzo.train import Predictor, TrainConfig, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("trained")
    config = tiny(write_tsv(folder / "rows.tsv", emotion_rows(90)), folder / "out", epochs=1)
    run(config)
    return config


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
