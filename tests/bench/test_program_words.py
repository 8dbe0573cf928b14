"""What the programs of `benchmarks` are asked is read before anything is measured: `--help` is answered, other words are refused."""

from __future__ import annotations

import sys

import pytest
from tests.bench.script import FOLDER, load_script

ASKED = ("limits", "watch_overhead", "diagnosis_overhead", "memory_by_size")


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("chekced", 2)])
def test_a_word_that_says_nothing_is_refused(
    name: str, word: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load_script(name)
    monkeypatch.setattr(sys, "argv", [name, word])
    with pytest.raises(SystemExit) as end:
        program.main()
    said = capsys.readouterr()
    assert end.value.code == code and "usage" in (said.err if code else said.out)


def test_no_program_reads_its_words_by_hand() -> None:
    assert [path.name for path in FOLDER.glob("*.py") if "sys.argv[" in path.read_text(encoding="utf-8")] == []
