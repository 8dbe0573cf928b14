"""What the commands print to a disk that is full, or after Ctrl-C and SIGTERM: nothing is lost, and one sentence says what to do."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.train.small import emotion_rows, tiny, words, write_tsv

from mezzo.cli import main
from mezzo.train import TrainConfig, trainer
from mezzo.train.metrics import MetricsLog

FULL = Path("/dev/full")
Ended = Callable[..., int]


class FullDisk(io.StringIO):
    """A stream on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny(write_tsv(tmp_path / "rows.tsv", emotion_rows(90)), tmp_path / "a run", epochs=1, log_every=1)


def test_a_log_on_a_full_disk_does_not_end_the_run(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert main(["train", *words(config)]) == 0
    assert (config.out / "result.json").exists()


def test_a_result_that_cannot_be_printed_is_where_the_sentence_says(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", FullDisk())
        assert main(["train", *words(config)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        said
        == f"mezzo train: the result cannot be printed: No space left on device. It is in {config.out / 'result.json'}."
    )
    assert (config.out / "result.json").exists() and (config.out / "curves.png").exists()


@pytest.mark.skipif(not FULL.is_char_device(), reason="needs /dev/full")
def test_standard_output_on_a_full_disk_is_named_once() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "mezzo", "--version"]
    with FULL.open("w") as full:
        ended = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "mezzo --version: standard output: No space left on device.\n")


def test_complaints_have_no_colour_where_none_is_wanted() -> None:
    command = [sys.executable, "-m", "mezzo", "policy", "shw"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_TYRO_ANSI_CODES"}
    ends, other = os.openpty()  # a terminal on standard output is what has them coloured
    asked = environment | {"TERM": "xterm", "NO_COLOR": "1"}
    on_terminal = subprocess.Popen(command, stdout=other, stderr=other, env=asked)
    in_pipe = subprocess.Popen(command, stdout=other, stderr=subprocess.PIPE, env=asked | {"NO_COLOR": ""})
    os.close(other)
    for shown in (in_pipe.communicate()[1], on_terminal.wait() and os.read(ends, 4096)):
        assert b"Unrecognized" in shown and b"\x1b[" not in shown
    os.close(ends)


@pytest.fixture
def ended(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Train with `end` called before some update, from 0; return the exit code."""
    update = trainer.Trainer._update

    def train(at: int, end: Callable[[], object], **options: object) -> int:
        def updated(self: trainer.Trainer, *args: object) -> None:
            if self.position.step == at:
                end()
            update(self, *args)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(trainer.Trainer, "_update", updated)
            return main(["train", *words(config.replace(**options))])

    return train


def in_a_finalizer(number: str) -> None:
    """Have a signal come in a `__del__`, where Python drops what its handler raises."""

    class Dropped:
        def __del__(self) -> None:
            signal.raise_signal(getattr(signal, number))

    Dropped()


def in_a_bare_except(number: str) -> None:
    """Have a signal come in an import that takes any error for a package that is not there."""
    try:
        signal.raise_signal(getattr(signal, number))
    except:  # noqa: E722
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("lose", [in_a_finalizer, in_a_bare_except])
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_something_swallowed_ends_the_run(
    lose: Callable[[str], None], number: str, code: int, ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)
    assert ended(1, lambda: lose(number), epochs=1000) == code
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)) == before
    assert "Go on from the last checkpoint with" in capsys.readouterr().err.splitlines()[-1]


THROUGH_AN_EXTENSION = """
import ctypes, signal, sys
from mezzo.cli import env, main

def run(argv):
    run_text = ctypes.pythonapi.PyRun_StringFlags
    run_text.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_void_p]
    run_text.restype = ctypes.py_object
    run_text(b"signal.raise_signal(signal.SIGTERM)", 257, globals(), globals(), None)

env.run = run
sys.exit(main(["env"]))
"""
"""A command that a signal ends in Python code which an extension runs, as extensions do while they are imported."""


@pytest.mark.skipif(sys.platform == "win32", reason="its processes have no signals")
def test_a_signal_in_an_extension_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "through.py").write_text(THROUGH_AN_EXTENSION)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "through"], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (143, "")


def test_a_script_that_catches_ctrl_c_goes_on_under_doctor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "catches.py"
    script.write_text(
        "import signal, time\ntry:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    pass\ntime.sleep(0.5)\nprint('went on')"
    )
    main(["doctor", str(script)])
    assert "went on" in capfd.readouterr().out


def test_a_signal_is_raised_once_where_cleaning_up_takes_long(ended: Ended) -> None:
    """What ends a run is not interrupted again while it is on its way, not even while its cleaning up meets errors of its own."""
    done: list[str] = []

    def end() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(0.5)
            try:
                int("no number")
            except ValueError:
                time.sleep(0.5)
            done.append("cleaned up")

    assert ended(1, end) == 143
    assert done == ["cleaned up"]


@pytest.mark.parametrize(("number", "code", "what"), [("SIGINT", 130, "the keyboard"), ("SIGTERM", 143, "SIGTERM")])
def test_a_run_that_is_ended_says_how_to_go_on(
    number: str, code: int, what: str, ended: Ended, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert ended(3, lambda: signal.raise_signal(getattr(signal, number)), eval_every=2) == code
    assert signal.getsignal(signal.SIGTERM) is before
    told = capsys.readouterr().err.splitlines()[-1]
    way_on = f"Go on from the last checkpoint with: mezzo train --resume --out '{config.out}'"
    assert told == f"mezzo train: ended by {what}. {way_on}"
    assert main(["train", "--resume", "--out", str(config.out)]) == 0


def test_a_run_that_is_ended_before_its_first_checkpoint_has_none(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words(config)]) == 0
    before = (config.out / "checkpoint.pt").read_bytes()
    capsys.readouterr()

    def end(config: TrainConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mezzo.train.loop.load_corpus", end)
    assert main(["train", *words(config), "--overwrite"]) == 130
    told = "mezzo train: ended by the keyboard before its first checkpoint, with nothing to go on from.\n"
    assert capsys.readouterr().err == told
    assert (config.out / "checkpoint.pt").read_bytes() == before


def test_an_interrupt_in_a_checkpoint_is_an_interrupt(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.save turns what ends a write into a RuntimeError."""

    class Ended(io.BytesIO):
        def write(self, data: object) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr("mezzo.train.checkpoint.write_atomically", lambda path, write: write(Ended()))
    monkeypatch.setattr("mezzo.train.loop._open_folder", lambda *_: None)
    monkeypatch.setattr("mezzo.train.trainer.MetricsLog", lambda path, step: MetricsLog(None, step))
    assert main(["train", *words(config)]) == 130
    assert "ended by the keyboard before its first checkpoint" in capsys.readouterr().err
