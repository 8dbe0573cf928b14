"""Scripts run under the tracer as Python itself runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mezzo.diagnose.doctor import trace_script
from mezzo.errors import DataError

LOOP = """
import sys, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
nn.init.constant_(net[2].weight, float(sys.argv[1]))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cpu")
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(10 * torch.ones(4, 8)).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("step", step)
"""


def script(folder: Path, source: str) -> Path:
    path = folder / "train.py"
    path.write_text(source, encoding="utf-8")
    return path


def test_a_faulty_script_ends_at_the_first_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trace_script(script(tmp_path, LOOP), ["30000"])
    [found] = run.report.faults
    assert (found.verdict, found.op, found.module, found.step) == ("overflow", "addmm", "2", 0)
    assert found.frame is not None and found.frame.file == str(tmp_path / "train.py")
    assert (run.error, run.stopped, capsys.readouterr().out) == (None, "at the first fault", "")


def test_a_scaler_that_finds_its_level_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trace_script(script(tmp_path, LOOP.replace("range(4)", "range(12)")), ["1.0"])
    assert run.report.is_healthy and (run.report.record.skipped, run.report.record.updates, run.stopped) == (4, 8, "")
    assert capsys.readouterr().out.count("step") == 12


def test_a_scaler_that_took_no_step_has_shown_nothing(tmp_path: Path) -> None:
    run = trace_script(script(tmp_path, LOOP), ["1.0"])
    assert {f.verdict for f in run.report.findings} == {"loss-scale"} and run.report.record.steps == 4
    assert run.report.answer == "not enough seen" and "left out every step (4)" in run.report.unseen


def test_going_on_after_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trace_script(script(tmp_path, LOOP), ["30000"], stop_at_fault=False)
    assert not run.report.is_healthy and run.stopped == ""
    assert capsys.readouterr().out.count("step") == 4


def test_steps_are_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trace_script(script(tmp_path, LOOP), ["1.0"], steps=2)
    assert run.stopped == "after 2 steps"
    assert capsys.readouterr().out == "step 0\nstep 1\n"
    record = run.report.record
    assert (record.steps, record.forwards, record.backwards) == (2, 2, 2)
    assert run.report.document().title.startswith("mezzo trace of Sequential: 2 steps, ")


def test_the_script_has_its_own_command_line_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "helper.py").write_text("WORD = 'helped'", encoding="utf-8")
    source = "import sys, helper\nif __name__ == '__main__': print(sys.argv[1:], helper.WORD)"
    argv, places = list(sys.argv), list(sys.path)
    trace_script(script(tmp_path, source), ["--lr", "3"])
    assert capsys.readouterr().out == "['--lr', '3'] helped\n"
    assert (sys.argv, sys.path) == (argv, places)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ValueError('own')", ValueError),
        ("raise SystemExit(3)", SystemExit),
        ("raise SystemExit(0)", None),
        ("", None),
    ],
)
def test_how_a_script_ends(tmp_path: Path, source: str, error: type[BaseException] | None) -> None:
    run = trace_script(script(tmp_path, source))
    assert type(run.error) is (error or type(None))
    assert run.report.answer == "not enough seen" and not run.report.findings


def test_a_script_that_catches_everything_is_ended_too(tmp_path: Path) -> None:
    source = LOOP.replace(
        "    scaler.scale(loss).backward()",
        "    try:\n        scaler.scale(loss).backward()\n    except Exception:\n        pass",
    )
    assert trace_script(script(tmp_path, source), ["30000"]).stopped == "at the first fault"


def test_no_such_script() -> None:
    with pytest.raises(DataError) as caught:
        trace_script("nowhere.py")
    assert str(caught.value) == "no script at 'nowhere.py'; give the path of a Python file."
