from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from tests.train.test_checkpoint import full_disk

from mezzo.errors import CheckpointError, ConfigError
from mezzo.train import TrainConfig, run
from mezzo.train.metrics import SMOOTHING, MetricsLog, SmoothedLoss, read_metrics, save_curves, tracking


def update(step: int, **changes: object) -> dict[str, object]:
    return {"kind": "update", "step": step, "loss": 1.0 / step, "scale": 2.0**step, "applied": True, **changes}


def test_records_reach_the_file_at_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.add(**update(1))
    assert read_metrics(path) == []
    log.flush()
    log.add(**update(2, label="好"))
    log.flush()
    log.flush()
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [update(1), update(2, label="好")]


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.add(**update(1, loss=math.inf, applied=False))
    log.add(kind="evaluation", step=1, loss=math.nan, accuracy=0.5)
    log.flush()
    assert "NaN" not in path.read_text() and [r["loss"] for r in read_metrics(path)] == [None, None]
    save_curves(path, tmp_path / "curves.png")


def test_a_resumed_run_takes_out_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(update(step)) + "\n" for step in (1, 2, 3)) + '{"kind": "upd', encoding="utf-8")
    assert read_metrics(path) == [update(1), update(2), update(3)]
    log = MetricsLog(path, 2)
    log.add(**update(3, loss=0.5))
    log.flush()
    assert read_metrics(path) == [update(1), update(2), update(3, loss=0.5)]


def test_a_new_run_starts_an_empty_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(update(1)) + "\n")
    MetricsLog(path, 0)
    assert read_metrics(path) == []


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in range(1, 200):
        log.add(**update(step))
    with full_disk(1000), pytest.raises(CheckpointError, match=r"cannot write .*metrics\.jsonl: File too large"):
        log.flush()


def test_a_folder_in_the_place_of_the_records_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    for step in (0, 3):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl.*[Ii]s a directory"):
            MetricsLog(path, step)


def test_smoothing_is_the_weighted_mean_of_the_past() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    smoothed = list(map(SmoothedLoss().add, values))
    for end in range(1, 6):
        weights = [SMOOTHING ** (end - 1 - i) for i in range(end)]
        wanted = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert smoothed[end - 1] == pytest.approx(wanted, rel=1e-12)


def test_the_picture_shows_the_records(tmp_path: Path) -> None:
    path, picture = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    log = MetricsLog(path, 0)
    for step in range(1, 30):
        log.add(**update(step))
    log.add(**update(30, loss=None, applied=False))
    log.add(kind="evaluation", step=30, loss=0.5, accuracy=0.75)
    log.flush()
    save_curves(path, picture)
    drawn = imread(picture)
    assert drawn.shape[:2] == (800, 700)
    pixels = np.rint(drawn[..., :3] * 255).astype(int).reshape(-1, 3)
    colours = set(map(tuple, pixels[np.sort(np.unique(pixels @ (1 << 16, 1 << 8, 1), return_index=True)[1])].tolist()))
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40)} <= colours  # loss, dev, accuracy, scale, skip
    save_curves(path, tmp_path / "again.png")
    assert picture.read_bytes() == (tmp_path / "again.png").read_bytes()


def test_a_run_without_loss_scale_has_no_empty_panel(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in range(1, 30):
        log.add(**update(step, scale=1.0))
    log.flush()
    save_curves(path, tmp_path / "curves.png")
    drawn = np.rint(imread(tmp_path / "curves.png")[..., :3] * 255).astype(int)
    assert drawn.shape[0] < 800 and not (drawn == (44, 160, 44)).all(-1).any()


def test_a_tracker_that_cannot_begin_says_why_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))  # where nobody has logged in
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as refusal, tracking("wandb", tmp_path):
        pytest.fail("it began")
    wandb.teardown()
    said = str(refusal.value)
    assert said.startswith("--tracker wandb cannot begin: No API key configured.") and "\n" not in said
    assert said.endswith("With WANDB_MODE=offline in the environment its numbers stay in the run's folder.")


def test_numbers_reach_a_run_of_wandb_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(KeyboardInterrupt), tracking("wandb", tmp_path) as track:  # what stops a run ends wandb's too
        track(1, {"train/loss": 0.25})
        track(2, {"train/loss": 0.125, "dev/accuracy": 0.75})
        raise KeyboardInterrupt
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wandb.teardown()  # its own process writes it, and has ended then
    written = path.read_bytes()
    assert written.count(b"train/loss") >= 2 and b"0.125" in written and b"dev/accuracy" in written


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.extras.find_spec", lambda name: None)
    told = r"--tracker wandb needs the package wandb: pip install 'mezzo\[trackers\]'\."
    with pytest.raises(ConfigError, match=told):
        run(TrainConfig(out=tmp_path / "out", tracker="wandb", device="cpu"))
    assert not (tmp_path / "out").exists()


def test_losses_that_stay_where_they_are_are_drawn_inside_and_updates_are_whole_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, figures, save = MetricsLog(tmp_path / "metrics.jsonl", 0), list[Figure](), Figure.savefig

    def kept(figure: Figure, *to: Any, **how: Any) -> None:
        figures.append(figure)
        save(figure, *to, **how)

    for step in (1, 2, 3):
        log.add(kind="update", step=step, loss=0.693, scale=1.0, applied=True)
        log.add(kind="evaluation", step=step, loss=0.6931, accuracy=0.5)
    log.flush()
    monkeypatch.setattr(Figure, "savefig", kept)
    save_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    loss, accuracy = figures[0].axes
    assert loss.get_ylim()[0] == 0.0 and loss.get_ylim()[1] > 1.03 * 0.6931
    assert all(tick == round(tick) for tick in accuracy.get_xticks())
