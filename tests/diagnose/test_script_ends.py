"""Processes that end past Python, forks, and errors that cannot be told: each leaves its report, and none is called healthy for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.cli import main

PARTS = """
import io, multiprocessing, os, sys, threading, torch
from concurrent.futures import ProcessPoolExecutor
torch.set_num_threads(1)  # a fork has none of the threads that OpenMP believes in
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 1), torch.randn(8, 4)

def train(is_bad=False):
    (torch.log(0 * model(x)) if is_bad else model(x)).square().mean().backward()
    return 1.0

def forked(*last):
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        train(*last)
        return True

fork = multiprocessing.get_context("fork")
"""


def script(folder: Path, source: str) -> str:
    path = folder / "train.py"
    path.write_text(PARTS + source, encoding="utf-8")
    return str(path)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # Python says nothing of a thread that exits
@pytest.mark.parametrize(("ending", "code"), [
    ("os._exit(0)", 0),
    ("os._exit(3)", 3),
    ("try:\n    os._exit(0)\nexcept BaseException:\n    while True: train()", 0),
    ("try:\n    raise ValueError\nfinally:\n    os._exit(0)", 0),
    ("threading.Thread(target=os._exit, args=(0,)).start()\nwhile True: train()", 0),
    ("threading.Thread(target=os._exit, args=(1,)).start()\nwhile True: train()", 3),
    ("os.execv(sys.executable, [sys.executable, '-c', ''])", 0),
    ("os.execlp('false', 'false')", 3),
])  # fmt: skip
def test_an_end_past_python_is_told_as_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str, code: int
) -> None:
    """The doctor ended with the script, without a word and with the script's exit code."""
    before = os._exit, os.fork, os.execv
    assert main(["doctor", script(tmp_path, f"train()\n{ending}")]) == code
    assert ("Healthy" in capsys.readouterr().out) is (code == 0)
    assert (os._exit, os.fork, os.execv) == before


@pytest.mark.parametrize(("source", "code"), [
    ("if forked(True): os._exit(0)", 1),
    ("forked(True)", 1),
    ("if forked(): os._exit(0)", 0),
    ("train()\nif forked(): sys.exit(0)", 0),
    ("if forked(): raise ValueError('mine')", 3),
    ("p = fork.Process(target=train, args=(True,))\np.start(); p.join()", 1),
    ("p = fork.Process(target=train)\np.start(); p.join()", 0),
    ("with fork.Pool(2) as pool: pool.map(train, [False, True])", 1),
    ("pool = fork.Pool(2)\npool.map(train, [False, False])\npool.close(); pool.join()", 0),
    ("with ProcessPoolExecutor(2, fork) as pool: list(pool.map(train, [False, True]))", 1),
])  # fmt: skip
def test_a_fork_leaves_its_report_and_prints_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, code: int
) -> None:
    """A fault in a fork was lost, told twice, or left a pool waiting for ever."""
    assert main(["doctor", script(tmp_path, source)]) == code
    told = capfd.readouterr()
    assert told.out.count("mezzo trace of ") == 1
    assert "of the script were traced: " in told.err


def test_a_pool_whose_workers_run_no_op_is_not_spoken_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", script(tmp_path, "with fork.Pool(2) as pool: pool.map(len, ['a', 'b'])\ntrain()")]) == 0
    assert "processes of the script" not in capfd.readouterr().err


@pytest.mark.parametrize("closing", [
    "sys.stdout.close()",
    "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nsys.stdout = None",
    "sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')",
    "sys.stderr.close()",
])  # fmt: skip
def test_a_script_that_closes_a_stream_is_told(tmp_path: Path, closing: str) -> None:
    """A process of its own: pytest's streams are not to be closed."""
    words = [
        sys.executable,
        "-m",
        "mezzo",
        "doctor",
        script(tmp_path, f"print('mine', flush=True)\ntrain()\n{closing}"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and re.match(r"mine\nmezzo trace of Linear(.|\n)*Healthy:", done.stdout)
    assert "Error" not in done.stderr


RUDE = """
class Rude({}):
    def {}(self): raise KeyError('in words')
train()
raise Rude
"""


@pytest.mark.parametrize("word", ["__repr__", "__str__"])
@pytest.mark.parametrize("base", ["Exception", "RuntimeError", "BaseException"])
def test_an_error_that_cannot_be_told_ends_a_script_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], base: str, word: str
) -> None:
    """The error of its words was told to nobody, and the script called healthy."""
    assert main(["doctor", script(tmp_path, RUDE.format(base, word))]) == 3
    told = capsys.readouterr()
    assert "Not enough seen: the program ended by itself with Rude" in " ".join(told.out.split())
    assert "mezzo doctor: the script ended by itself with Rude" in told.err
