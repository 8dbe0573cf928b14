"""A killed run goes on as if it had never been stopped."""

from __future__ import annotations

import _thread
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.train.small import metrics, tiny, words, write_tsv
from tests.train.test_checkpoint import full_disk

from mezzo.cli import main
from mezzo.train import TrainConfig, run
from mezzo.train.checkpoint import load_checkpoint
from mezzo.train.text_files import read_reviews

POLICY = "fp16, scaling.growth_interval=7, scaling.init_scale=1024"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {row.text.strip(): row.label for row in read_reviews()[::40] if row.text.strip() and "\t" not in row.text}
    return write_tsv(tmp_path_factory.mktemp("data") / "reviews.tsv", list(rows.items()))


def long_run(data: Path, out: Path) -> TrainConfig:
    return tiny(data, out, policy=POLICY, epochs=3, eval_every=8, vocab_size=1000, limit=300, lr=1e-3, ema=0.9)


def short_run(data: Path, out: Path) -> TrainConfig:
    return tiny(data, out, policy=POLICY, epochs=1, eval_every=2, vocab_size=300, limit=80, lr=1e-3, ema=0.9)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mezzo", "train", *arguments]


def kill_in_the_middle(config: TrainConfig, wanted: int) -> None:
    """Start the run in a process of its own and kill it some updates after a checkpoint is written."""
    path = config.out / "metrics.jsonl"
    process = subprocess.Popen(command(*words(config)), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        while not (path.exists() and path.read_text().count("\n") >= wanted):
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def assert_same_end(config: TrainConfig, undisturbed: TrainConfig) -> None:
    assert metrics(config.out) == metrics(undisturbed.out)
    one, other = (load_checkpoint(c.out / "checkpoint.pt") for c in (config, undisturbed))
    assert one["step"]["model"].keys() == other["step"]["model"].keys()
    assert all(torch.equal(tensor, other["step"]["model"][name]) for name, tensor in one["step"]["model"].items())
    assert repr(one["step"]) == repr(other["step"])
    assert one["schedule"] == other["schedule"]
    averages = [state["average"] for state in (one, other)]
    assert averages[0].keys() == averages[1].keys() != set()
    assert all(torch.equal(tensor, averages[1][name]) for name, tensor in averages[0].items())
    best = [(c.out / "best" / "model.safetensors").read_bytes() for c in (config, undisturbed)]
    assert best[0] == best[1]


@pytest.fixture(scope="module")
def undisturbed(reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = long_run(reviews, tmp_path_factory.mktemp("whole") / "out")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run(config)
    torch.set_num_threads(threads)
    return config


@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_same_bits(reviews: Path, undisturbed: TrainConfig, tmp_path: Path) -> None:
    killed = long_run(reviews, tmp_path / "killed")
    scales = {record["scale"] for record in metrics(undisturbed.out) if record["kind"] == "update"}
    assert len(scales) > 3  # the scale moves, so its counter must survive as well
    kill_in_the_middle(killed, wanted=20)
    done = load_checkpoint(killed.out / "checkpoint.pt")["position"]["step"]
    assert 0 < done < len(metrics(undisturbed.out))
    assert not (killed.out / "result.json").exists()
    resumed = subprocess.run(
        command("--resume", "--out", str(killed.out), "--json"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["report"] == json.loads((undisturbed.out / "result.json").read_text())["report"]
    assert_same_end(killed, undisturbed)


def test_ended_by_the_keyboard_it_says_how_to_go_on(
    reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = long_run(reviews, tmp_path / "my run")

    def press_ctrl_c() -> None:
        while not (config.out / "checkpoint.pt").exists():
            time.sleep(0.002)
        _thread.interrupt_main()

    thread = threading.Thread(target=press_ctrl_c, daemon=True)
    thread.start()
    assert main(["train", *words(config)]) == 130
    thread.join()
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("mezzo train: ended by the keyboard. Go on from the last checkpoint with: mezzo train ")
    assert shlex.split(last.partition(" with: mezzo train ")[2]) == ["--resume", "--out", str(config.out)]
    assert not (config.out / "result.json").exists()


def test_a_disk_that_fills_up_costs_nothing_but_time(
    reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed, filled = (short_run(reviews, tmp_path / name) for name in ("undisturbed", "filled"))
    run(undisturbed)
    weights = (undisturbed.out / "best" / "model.safetensors").stat().st_size
    with full_disk(3 * weights):  # room for the first checkpoint, not for one with the optimizer's two moments as well
        assert main(["train", *words(filled)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"mezzo train: cannot write {filled.out / 'checkpoint.pt'}: File too large; the one before it is kept. "
        "Make room or choose another --out, then go on with --resume."
    )
    assert load_checkpoint(filled.out / "checkpoint.pt")["position"]["step"] == 0
    assert main(["train", "--resume", "--out", str(filled.out)]) == 0
    assert_same_end(filled, undisturbed)


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_is_answered_by_the_first_rank_alone(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(config: TrainConfig) -> None:
        (tmp_path / "checkpoint.pt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("mezzo.cli.train.train", stopped)
    monkeypatch.setenv("RANK", f"{rank}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.count("--resume") == (rank == 0)
