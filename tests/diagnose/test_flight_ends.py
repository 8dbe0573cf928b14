"""What a kill, a full disk, a fork or the end of a program leave of a record, and what a watch of the same run."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnose import test_flight
from tests.diagnose.test_flight import Batch, batches, build, loss_fn, train
from torch import Tensor, nn

import mezzo
from mezzo.cli.main import main
from mezzo.errors import DataError


@pytest.mark.parametrize(("place", "last"), [("forward", 9), ("update", 10)])
def test_what_a_kill_leaves_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, last: int) -> None:
    data, loss, save, step = batches(12), loss_fn, torch.save, mezzo.Stepper.step

    def killing(model: nn.Module, batch: Batch) -> Tensor:
        if batch is data[10] and place == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    def killed(amp: mezzo.Stepper, **options: Any) -> mezzo.StepResult:
        if amp.counters().seen == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(amp, **options)

    def slowly(*given: Any, **how: Any) -> None:
        time.sleep(0.02)
        save(*given, **how)

    whole = train(tmp_path / "whole", data)
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)  # a fork has none of the threads that OpenMP believes in
        try:
            monkeypatch.setattr(torch, "save", slowly)
            monkeypatch.setattr(mezzo.Stepper, "step", killed)
            monkeypatch.setattr(test_flight, "loss_fn", killing)
            train(tmp_path / "run", data)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    again = mezzo.replay(tmp_path / "run", last, build)
    assert (again.grad_norm, again.scale) == (whole[last].grad_norm, whole[last].scale)


@pytest.mark.parametrize("last", [8, 10])
def test_a_kill_while_a_snapshot_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    data, loss, write, begun = batches(12), loss_fn, os.pwrite, threading.Event()

    def killing(model: nn.Module, batch: Batch) -> Tensor:
        if batch is data[10]:
            begun.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    def stuck(file: int, pages: memoryview, at: int) -> int:
        written = write(file, pages[: mmap.PAGESIZE], at)
        if (tmp_path / "run" / "00000008").is_dir():
            begun.set()
            threading.Event().wait()  # until the kill
        return written

    whole = train(tmp_path / "whole", data)
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)  # a fork has none of the threads that OpenMP believes in
        try:
            monkeypatch.setattr(os, "pwrite", stuck)
            monkeypatch.setattr(test_flight, "loss_fn", killing)
            train(tmp_path / "run", data)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    again = mezzo.replay(tmp_path / "run", last, build)
    assert (again.grad_norm, again.scale) == (whole[last].grad_norm, whole[last].scale)
    assert (again.first_different, again.compared) == (None, 4)  # the results of its first steps had not been read


def test_a_snapshot_that_cannot_be_written_is_told_by_a_step_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    amp = mezzo.prepare(*build()[:2], policy="fp32")

    def take(recorder: mezzo.diagnose.Recorder, num: int) -> None:
        for batch in recorder.batches(batches(num)):
            amp.backward(loss_fn(amp.model, batch))
            amp.step()
            amp.zero_grad()
            recorder._writer.submit(int).result()  # whose thread has ended the snapshot before it

    with mezzo.record(amp, tmp_path / "run", every=100) as recorder:
        take(recorder, 100)
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(
            DataError, match=r"keep step 10[01] in .*could not be written: .*No space left.*Close the recorder"
        ):
            take(recorder, 9)
        taken = recorder.step
    assert amp.counters().seen == taken
    assert mezzo.replay(tmp_path / "run", taken - 1, build).is_healthy


def test_a_program_that_forks_and_ends_while_a_snapshot_is_written_ends(tmp_path: Path) -> None:
    code = """
import os, pathlib, sys, time, torch, mezzo
write = os.pwrite
model = torch.nn.Linear(4, 4)
amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
recorder = mezzo.record(amp, sys.argv[1], every=1)
for step in range(2):
    recorder.note(torch.ones(2, 4))
    amp.backward(model(torch.ones(2, 4)).sum())
    amp.step()
    amp.zero_grad()
    os.pwrite = lambda *given: (time.sleep(1), write(*given))[1]
child = os.fork()
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", code, str(tmp_path / "run")],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "run" / "00000001" / "start.pt").is_file()


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("leaves", ["nothing", "a folder"])
def test_a_step_whose_batches_are_not_all_there_is_told(tmp_path: Path, leaves: str, lost: int) -> None:
    train(tmp_path, batches(12), accumulate=3)
    batch = tmp_path / "00000000" / f"00000001.{lost}.batch"
    batch.unlink()
    if leaves == "a folder":
        batch.mkdir()
    with pytest.raises(DataError, match=rf"00000001\.{lost}\.batch.* cannot be read as a record"):
        mezzo.replay(tmp_path, 3, build)


@pytest.mark.parametrize("first_closed", ["inner", "outer"])
@pytest.mark.parametrize("outer", ["record", "watch"])
def test_a_recorder_and_a_watch_of_one_run_leave_each_other_at_work(
    outer: str, first_closed: str, tmp_path: Path
) -> None:
    model, optimizer, _ = build()
    amp = mezzo.prepare(model, optimizer, policy=test_flight.POLICY)
    (batch,) = batches(1)

    def take_step() -> None:
        amp.zero_grad()
        amp.backward(loss_fn(model, batch))
        amp.step()

    makers: list[Callable[[], Any]] = [lambda: mezzo.record(amp, tmp_path), lambda: mezzo.diagnose.watch(amp, every=1)]
    made = [make() for make in (makers if outer == "record" else reversed(makers))]
    take_step()
    gone, stays = reversed(made) if first_closed == "inner" else made
    gone.close()
    take_step()
    stays.close()
    take_step()
    counts = {id(m): m.step if isinstance(m, mezzo.diagnose.Recorder) else len(m.report.steps) for m in made}
    assert (counts[id(gone)], counts[id(stays)]) == (1, 2)
    assert not vars(amp).keys() & {"step", "backward"} or first_closed == "outer"


def test_a_replay_is_folded_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, batches(2))
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["replay", str(tmp_path), "--step", "1", "--model", f"{test_flight.__file__}:build", "--trace"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 60 and sum(line.startswith("mezzo ") for line in said) == 2


def test_a_replay_under_another_policy_tells_the_caller_nothing_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, batches(3), policy="bf16-master")
    whole = [mezzo.replay(tmp_path, 2, build, policy=policy).losses for policy in ("bf16", "fp32", "bf16-master")]
    assert "under another policy" not in caplog.text
    assert whole[0] == pytest.approx(whole[1], rel=2**-6) and whole[2] == pytest.approx(whole[1], rel=2**-6)
