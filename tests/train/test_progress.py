from __future__ import annotations

import io
import sys

import pytest

from mezzo.train.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_shows_loss_scale_skipped_updates_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar(3, 20) as progress:
        progress.update(9, loss=0.4321, scale=65536.0, skipped=2)
        progress.note("update 9/20: [dev] accuracy 0.5")
    shown = terminal.getvalue()
    for words in ("9/20", "loss 0.432", "scale 65536", "skipped 2", "0:00:", "update 9/20: [dev] accuracy 0.5"):
        assert words in shown


def test_elsewhere_there_are_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(0, 20) as progress:
        progress.update(9, loss=0.4321, scale=65536.0, skipped=2)
        progress.note("update 9/20")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "update 9/20\n")
