from __future__ import annotations

import io
import sys

import pytest

from mezzo.train.metrics import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return terminal


def test_on_a_terminal_a_bar_shows_loss_scale_skipped_updates_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with progress_bar(3, 20) as progress:
        progress.update(9, loss=0.4321, lr=1e-3, scale=65536.0, skipped=2)
        progress.note("update 9/20: [dev] accuracy 0.5")
    shown = terminal.getvalue()
    for words in ("9/20", "loss 0.432", "scale 65536", "skipped 2", "0:00:", "update 9/20: [dev] accuracy 0.5"):
        assert words in shown


def test_elsewhere_there_are_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(0, 20) as progress:
        progress.update(9, loss=0.4321, lr=1e-3, scale=65536.0, skipped=2)
        progress.note("update 9/20")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "update 9/20\n")


def test_elsewhere_the_loss_has_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(0, 5, every=2) as progress:
        for step, loss in enumerate((1.0, 3.0, float("inf"), 2.0, 2.0), start=1):
            progress.update(step, loss=loss, lr=1e-3, scale=2.0, skipped=0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["update 1/5", "update 2/5", "update 4/5", "update 5/5"]
    assert lines[0] == "update 1/5: loss 1.0000, smoothed 1.0000, lr 0.001, scale 2"
    assert "smoothed 2.0256" in lines[1]  # (0.95 x 0.05 x 1 + 0.05 x 3) / (1 - 0.95 ** 2)


def test_the_bar_smooths_from_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with progress_bar(0, 20) as progress:
        progress.update(1, loss=1.0, lr=1e-3, scale=1.0, skipped=0)
        progress.update(2, loss=float("nan"), lr=1e-3, scale=1.0, skipped=1)
    assert "loss 1.000" in terminal.getvalue() and "nan" not in terminal.getvalue()
