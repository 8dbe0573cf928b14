"""One run on many ranks: the weights, the reports and the files of one rank, and one sentence when something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run as on_ranks
from tests.train.rank_jobs import evaluate_texts, train
from tests.train.small import emotion_rows, metrics, tiny, words, write_tsv

from mezzo.errors import ConfigError
from mezzo.train import TrainConfig, run
from mezzo.train.checkpoint import load_checkpoint
from mezzo.train.evaluate import micro_batches

pytestmark = pytest.mark.distributed

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tsv(tmp_path_factory.mktemp("data") / "emotions.tsv", emotion_rows(240))


def _weights(config: TrainConfig) -> dict[str, Any]:
    saved = load_checkpoint(config.out / "checkpoint.pt")
    saved["position"]["seconds"] = 0.0
    return {"step": saved["step"], "schedule": saved["schedule"], "position": saved["position"]}


def _differing(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        return [name for key in one for name in _differing(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        return [name for place, item in enumerate(one) for name in _differing(item, other[place], f"{path}.{place}")]
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    return [] if repr(one) == repr(other) else [path]


# 33 rows in batches of 16: the last batch has one row, and so none for the second rank.
@pytest.mark.parametrize("policy", [pytest.param("fp32", marks=pytest.mark.slow), "bf16", "bf16-master"])
def test_two_ranks_train_as_one_bit_for_bit(policy: str, data: Path, tmp_path: Path) -> None:
    one, two = (
        tiny(data, tmp_path / name, policy=policy, limit=33, micro_batches=2, lr=3e-3) for name in ("one", "two")
    )
    (wanted,) = on_ranks(1, train, one)
    for found in on_ranks(2, train, two):
        assert found == wanted
    assert _differing(_weights(two), _weights(one)) == []
    assert metrics(two.out) == metrics(one.out)
    best = [(config.out / "best" / "model.safetensors").read_bytes() for config in (one, two)]
    assert best[0] == best[1]


def test_two_ranks_at_a_loss_scale_are_one_at_twice_that_scale(data: Path, tmp_path: Path) -> None:
    # A rank's gradients are divided after they have left fp16, so they carry the scale and the number of ranks.
    one, two = (
        tiny(
            data, tmp_path / str(scale), policy=f"fp16, scaling.init_scale={scale}", limit=33, micro_batches=2, lr=3e-3
        )
        for scale in (8192, 4096)
    )
    on_ranks(1, train, one)
    on_ranks(2, train, two)
    ends = [_weights(config) for config in (one, two)]
    scales = [end["step"].pop("scaling")["scale"] for end in ends]
    assert scales == [8192.0, 4096.0]
    for end in ends:
        del end["step"]["policy"]
    assert _differing(*ends) == []


def test_pieces_make_up_the_batch_whose_mean_they_sum() -> None:
    for rows in ([], [3], [3, 1, 2], list(range(16))):
        for count in (1, 2, 3, 5):
            found = micro_batches(rows, count)
            assert [row for piece in found for row in piece] == rows
            assert len(found) == count and max(map(len, found)) - min(map(len, found)) <= 1


def test_a_batch_in_pieces_is_the_whole_batch_but_for_the_order_of_sums(data: Path, tmp_path: Path) -> None:
    whole, cut = (
        tiny(data, tmp_path / str(count), policy="fp32", micro_batches=count, dropout=0.0, token_dropout=0.0, epochs=1)
        for count in (1, 4)
    )
    run(whole), run(cut)
    losses = [
        [record["loss"] for record in metrics(config.out) if record["kind"] == "update"] for config in (whole, cut)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[1] != losses[0]


@pytest.mark.parametrize(("batch_size", "count"), [(7, 100), (64, 100), (1, 2)])
def test_three_ranks_report_what_one_does(batch_size: int, count: int) -> None:
    ((wanted, wanted_report, seen),) = on_ranks(1, evaluate_texts, batch_size, count)
    assert sum(seen) == count and count % 3
    found = on_ranks(3, evaluate_texts, batch_size, count)
    for evaluation, made, _ in found:
        assert (evaluation, made) == (wanted, wanted_report)
    assert sorted(size for _, _, sizes in found for size in sizes) == sorted(seen)  # each row once


class TestRestart:
    @pytest.fixture(autouse=True)
    def job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")

    def test_what_the_launcher_starts_again_goes_on(
        self, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = tiny(data, tmp_path / "out", epochs=1, overwrite=True)
        first = run(config)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert run(config).seconds == first.seconds  # nothing was left to do
        total = first.applied_steps + first.skipped_steps
        assert f"restart 1: going on from update {total}/{total}" in capsys.readouterr().err

    def test_but_not_with_the_run_of_another_job(
        self, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = tiny(data, tmp_path / "out", epochs=1)
        run(config)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another job")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        with pytest.raises(ConfigError, match="holds a run already"):
            run(config)


def command(config: TrainConfig, *more: str) -> list[str]:
    return [sys.executable, "-m", "mezzo", "train", *words(config), *more]


def _two_ranks(config: TrainConfig) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(config, "--nproc", "2"), env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_all_ranks_find_wrong_is_said_once(data: Path, tmp_path: Path) -> None:
    ended = _two_ranks(tiny(data, tmp_path / "out", device="gpu"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("mezzo train: device='gpu' cannot be used here"), ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device for each rank")
def test_ranks_on_devices_of_their_own_train_over_nccl(data: Path, tmp_path: Path) -> None:
    ended = _two_ranks(tiny(data, tmp_path / "out", device="cuda", epochs=1))
    assert ended.returncode == 0, ended.stderr
    assert "on cuda:0, 2 ranks" in ended.stdout


@pytest.mark.slow
def test_what_only_the_first_rank_finds_wrong_ends_all(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path / "out")
    (config.out / "checkpoint.pt.partial").mkdir(parents=True)  # in the way of the first checkpoint
    ended = _two_ranks(config)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"mezzo train: cannot write {config.out / 'checkpoint.pt'}: Is a directory"), (
        ended.stderr
    )
    assert ended.stderr.count("\n") == 1, ended.stderr


def _ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children if b"mezzo" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _wait_for_records(process: subprocess.Popen[str], config: TrainConfig, wanted: int) -> None:
    path = config.out / "metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") >= wanted):
        assert process.poll() is None, "the run ended before it could be disturbed"
        time.sleep(0.01)


def _kill_a_rank(config: TrainConfig, *more: str) -> tuple[int, str, str]:
    """Start two ranks, kill the second some updates after a checkpoint, and return how the launcher ended."""
    process = subprocess.Popen(
        command(config, "--nproc", "2", *more),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for_records(process, config, 10)
        os.kill(_ranks_of(process.pid)[1], signal.SIGKILL)
        out, error = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, error


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the ranks are found in /proc")
def test_a_killed_rank_ends_the_run_and_a_restart_ends_as_if_nothing_had_been(data: Path, tmp_path: Path) -> None:
    whole, stopped, restarted = (
        tiny(data, tmp_path / name, policy="bf16-master", epochs=12, eval_every=8, lr=3e-3, limit=120)
        for name in ("whole", "stopped", "restarted")
    )
    ended = _two_ranks(whole)
    assert ended.returncode == 0, ended.stderr
    code, out, error = _kill_a_rank(stopped)
    assert (code, out) == (2, "")
    assert error.splitlines()[-1] == (
        "mezzo train: rank 1 was ended by SIGKILL, and the others were stopped. Go on from the last checkpoint with "
        "--resume, or let --max-restarts do so."
    )
    code, out, error = _kill_a_rank(restarted, "--max-restarts", "1")
    assert code == 0, error
    assert "restart 1: going on from update" in error and "test accuracy" in out
    assert _differing(_weights(restarted), _weights(whole)) == []
    assert metrics(restarted.out) == metrics(whole.out)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_run_goes_on_on_another_number_of_ranks_with_the_same_bits(
    first: int, then: int, data: Path, tmp_path: Path
) -> None:
    whole, stopped = (
        tiny(data, tmp_path / name, policy="bf16-master", epochs=12, eval_every=8, lr=3e-3, limit=120, micro_batches=2)
        for name in ("whole", "stopped")
    )
    on_ranks(1, train, whole)
    process = subprocess.Popen(
        command(stopped, "--nproc", str(first)), env=ENVIRONMENT, stderr=subprocess.DEVNULL, text=True
    )
    _wait_for_records(process, stopped, 10)
    process.terminate()
    process.wait()
    assert not (stopped.out / "result.json").exists()
    on_ranks(then, train, stopped.replace(resume=True))
    assert _differing(_weights(stopped), _weights(whole)) == []
    assert metrics(stopped.out) == metrics(whole.out)
