"""`mezzo doctor`: exit codes, the diagnosis on standard output, the page, JSON."""

from __future__ import annotations

import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from mezzo.cli import main
from mezzo.formats import NativeSupport

SCRIPT = """
import sys, torch
model = torch.nn.Linear(4, 4)
x = torch.ones(2, 4) * (float("nan") if "faulty" in sys.argv else 1.0)
print("from the script")
model(x).sum().backward()
if "crash" in sys.argv: raise ValueError("own fault")
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return str(tmp_path / "train.py")


def test_healthy(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith("from the script\nmezzo trace of Linear: 1 step, ")
    assert "Healthy: no inf or NaN reached" in out


def test_faulty(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", path, "faulty"]) == 1
    told = capsys.readouterr()
    assert f"Faulty: inherited in mul, forward, module (outside any module) at {path}:4." in " ".join(told.out.split())
    assert "mezzo doctor: the script was ended at the first fault." in told.err


def test_a_fault_of_the_script_itself(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", path, "crash"]) == 3
    err = capsys.readouterr().err
    assert "ValueError: own fault" in err
    assert "mezzo doctor: the script ended by itself with ValueError('own fault')." in err
    assert re.findall('File "(.*)"', err) == [path]


def test_a_script_that_python_cannot_read_is_shown_alone(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(path).write_text("x = (\n", encoding="utf-8")
    assert main(["doctor", path]) == 3
    err = capsys.readouterr().err
    assert re.findall('File "(.*)"', err) == [path]
    assert "SyntaxError: '(' was never closed" in err


def test_faulty_before_it_crashes(path: str) -> None:
    assert main(["doctor", "--all", path, "faulty", "crash"]) == 1


def test_json_is_alone_on_standard_output(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", path, "faulty"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["findings"][0]["verdict"] == "inherited"
    assert "from the script" in told.err


@pytest.mark.parametrize(("no_colour", "is_coloured"), [("", True), ("1", False)])
def test_a_terminal_is_asked_for_no_colour(
    no_colour: str, is_coloured: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal, redirect_stdout(terminal):
        assert main(["doctor", path]) == 0
        terminal.flush()
        shown = b""
        while b"Healthy" not in shown:
            shown += os.read(reader, 10_000)
    os.close(reader)
    assert (b"\x1b[" in shown) is is_coloured


def test_the_page(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert main(["doctor", "--html", str(page), path, "faulty"]) == 1
    assert "<h1>mezzo trace of Linear" in page.read_text(encoding="utf-8")
    assert f"the page is {page}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere.py"], "mezzo doctor: no script at 'nowhere.py'; give the path of a Python file."),
        (["--steps", "0", "x.py"], "mezzo doctor: --steps 0: give a number of steps of at least 1, or leave it out."),
        (["--html", "no/where/x.html", "x.py"], "mezzo doctor: --html no/where/x.html: its folder does not exist; create it first."),
        (["--html", ".", "x.py"], "mezzo doctor: --html .: a folder; give the path of a file."),
        (["--html", "", "x.py"], "mezzo doctor: --html .: a folder; give the path of a file."),
        (["--policy", "bf16", "x.py"], "mezzo doctor: --policy is for --model: a script runs in the precision it asks for itself. Leave it out."),
        (["--model", "a:b", "--steps", "3"], "mezzo doctor: --steps is for a script: with --model one step is looked at. Leave it out."),
        (["--model", "a:b", "--all"], "mezzo doctor: --all is for a script: with --model one step is looked at. Leave it out."),
        ([], "mezzo doctor: give either a script or --model MODULE:FUNCTION."),
        (["--model", "a:b", "x.py"], "mezzo doctor: give either a script or --model MODULE:FUNCTION."),
        (["--model", "nothing"], "--model 'nothing' names no function; write package.module:function or file.py:function."),
        (["--model", "no.such.module:make"], "no module 'no.such.module' on the Python path"),
        (["--model", "nowhere.py:make"], "no file at 'nowhere.py'"),
        (["--model", "math:sqrtt"], "math has no function 'sqrtt'. Did you mean 'sqrt'?"),
        (["--model", "os:getcwd"], "os:getcwd returned str; return (model, batch) or (model, batch, loss_fn)."),
    ],
)  # fmt: skip
def test_bad_input(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert complaint in capsys.readouterr().err


MODEL = """
import torch
from torch import nn

class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, x):
        return x * (torch.arange(x.shape[1]).float()[:, None] @ self.inv_freq[None]).float().sin().repeat(1, 2)

def faulty():
    return nn.Sequential(nn.Linear(8, 8), Rotary()), torch.randn(1, 4096, 8)

def healthy():
    return nn.Linear(8, 8), torch.randn(4, 8), lambda model, x: model(x).float().square().mean()
"""


@pytest.mark.parametrize(("name", "code"), [("faulty", 1), ("healthy", 0)])
def test_a_model_is_looked_at(name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "subject.py").write_text(MODEL, encoding="utf-8")
    assert main(["doctor", "--policy", "bf16", "--model", f"{tmp_path / 'subject.py'}:{name}"]) == code
    out = capsys.readouterr().out
    assert ("integers-in-16-bit" in out) == (name == "faulty")
    assert all(f"mezzo {tool} of " in out for tool in ("lint", "explain", "compare"))


def test_a_module_on_the_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "subject_on_path.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json", "--policy", "bf16", "--model", "subject_on_path:faulty"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [r["model"] for r in data["reports"]] == ["Sequential"] * 3


@pytest.fixture
def without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such processors are not here, so what they report is put in their place."""

    def only_fp32(device: object, dtype: torch.dtype) -> NativeSupport:
        return NativeSupport(native=dtype is torch.float32, reason="as an old Xeon reports")

    monkeypatch.setattr("mezzo.policy.fields.native_support", only_fp32)


@pytest.mark.usefixtures("without_units")
def test_a_model_is_looked_at_in_bf16_where_auto_is_fp32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "subject.py").write_text(MODEL, encoding="utf-8")
    assert main(["doctor", "--model", f"{tmp_path / 'subject.py'}:faulty"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Looked at under bf16: auto is fp32 on cpu, where nothing would be cast." in out
    assert "integers-in-16-bit" in out and "mezzo compare of " in out


@pytest.mark.usefixtures("without_units")
@pytest.mark.parametrize("policy", ["auto", "fp32"])
def test_a_model_under_fp32_has_nothing_to_be_looked_at(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "subject.py").write_text(MODEL, encoding="utf-8")
    assert main(["doctor", "--policy", policy, "--model", f"{tmp_path / 'subject.py'}:healthy"]) == 2
    assert capsys.readouterr() == (
        "", f"mezzo doctor: the policy {policy!r} is fp32 on cpu, where nothing is cast and nothing is to be looked at. Write 'bf16' or 'fp16'.\n"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["nomodule", "empty", "empty.nothing", "own.py", "", "..own"])
def test_a_module_that_cannot_be_run_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").touch()
    (tmp_path / "own.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "-m", name]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"mezzo doctor: the module {name!r} cannot be run: ")
    assert said.err.endswith(
        ". Give the name of a module, as python -m takes it, or the path of a script without -m.\n"
    )


def test_an_archive_without_a_script_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({}, tmp_path / "checkpoint.pt")
    assert main(["doctor", str(tmp_path / "checkpoint.pt")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "can't find '__main__' module" in said.err


def test_a_module_that_misses_another_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "misses.py").write_text("import nothing_of_the_kind\n")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "-m", "misses"]) == 3
    err = capsys.readouterr().err
    assert re.findall('File "(.*)"', err) == [str(tmp_path / "misses.py")]
    assert "No module named 'nothing_of_the_kind'" in err


@pytest.mark.parametrize("words", [["{}/wrong.py"], ["--model", "{}/wrong.py:make"]])
@pytest.mark.parametrize(
    "text", ["import torch\nx = (1,\n", "import torch\ndef make():\n    raise ValueError('mine')\nmake()\n"]
)
def test_what_fails_of_the_user_is_shown_without_our_frames(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(text, encoding="utf-8")
    assert main(["doctor", *(word.format(tmp_path) for word in words)]) == 3
    told = capsys.readouterr().err
    assert "mezzo/" not in told and "runpy" not in told and "importlib" not in told
    assert f'File "{tmp_path / "wrong.py"}", line' in told
    assert told.splitlines()[-1].startswith("mezzo doctor: ") and "ended by itself with" in told


def test_a_page_that_cannot_be_written_is_told_before_the_script_runs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mezzo.files.os.access", lambda path, how: False)
    assert main(["doctor", "--html", str(tmp_path / "a.html"), path]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert (
        told.err
        == f"mezzo doctor: --html {tmp_path / 'a.html'}: {tmp_path} cannot be written. Name a file that can be.\n"
    )


@pytest.mark.parametrize("name", ["train.py", "/proc/page.html"])
def test_a_page_in_place_of_a_program_or_nowhere_is_told_before_the_script_runs(
    name: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--html", str(Path(path).parent / name), path]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("mezzo doctor: --html ") and told.err.count("\n") == 1
    assert Path(path).read_text(encoding="utf-8") == SCRIPT


@pytest.mark.parametrize("content", [b"\x7fELF\0\0", b"\xb0\xff", b"# coding: nothing\n", None])
@pytest.mark.parametrize("words", [["{}"], ["--model", "{}:make"]])
def test_a_file_that_is_no_text_is_no_script(
    content: bytes | None, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.py"
    file.write_bytes(content) if content else file.symlink_to("/proc/self/mem")  # which nobody can read as a file
    assert main(["doctor", *(word.format(file) for word in words)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"mezzo doctor: the file {str(file)!r} cannot be read: ")
    assert told.err.count("\n") == 1 and "Give the path of a Python file." in told.err


def test_no_room_for_what_follows_processes_is_no_fault_of_the_script(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert main(["doctor", path]) == 2
    told = capsys.readouterr()
    assert (
        told.out == "" and told.err.startswith(f"mezzo doctor: {tmp_path / 'nowhere'}/") and told.err.count("\n") == 1
    )


def test_a_function_of_model_that_ends_the_program_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ends.py").write_text("def build():\n    raise SystemExit(5)\n")
    assert main(["doctor", "--model", f"{tmp_path / 'ends.py'}:build"]) == 3
    assert "ends.py:build ended by itself with SystemExit(5)" in capsys.readouterr().err


def test_a_script_that_moves_and_takes_standard_output_over_is_told_where_it_was_asked(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As hydra and loggers do: the report went into the script's log, and the page into its folder."""
    (tmp_path / "elsewhere").mkdir()
    moves = "import io, os, sys\nos.chdir('elsewhere')\nsys.stdout = io.StringIO()\n"
    Path(path).write_text(moves + SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--html", "page.html", path]) == 0
    assert capsys.readouterr().out.startswith("mezzo trace of Linear: 1 step, ")
    assert (tmp_path / "page.html").is_file() and not any((tmp_path / "elsewhere").iterdir())


def test_a_script_that_ends_by_an_error_of_its_own_kind_is_not_healthy(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No Exception, as the cancelled task of an event loop is none: it ended the command too, as if faulty. One whose code is None passed for sys.exit()."""
    Path(path).write_text(
        f"class Ended(BaseException):\n    code = None\n{SCRIPT}\nraise Ended('mine')\n", encoding="utf-8"
    )
    assert main(["doctor", path]) == 3
    told = capsys.readouterr()
    assert "the program ended by itself with Ended('mine')" in " ".join(told.out.split())
    assert "mezzo doctor: the script ended by itself with Ended('mine')." in told.err
