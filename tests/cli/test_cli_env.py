"""`mezzo env`: one page for a reader, the same as JSON for a program."""

from __future__ import annotations

import json
import os
import threading
from contextlib import redirect_stdout

import pytest
import torch

from mezzo import Policy
from mezzo.cli import main


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--device", "cpu", "--budget-s", "0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "measured", "auto", "advice"}
    assert found["auto"] == str(Policy.parse("auto").resolve("cpu"))
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert set(found["measured"]["formats"]) == {"fp32", "bf16", "fp16"}
    assert found["advice"]


def test_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--device", "cpu", "--budget-s", "0.2"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for line in (
        f"torch         {torch.__version__}",
        "policy auto   resolves to: ",
        "every device computes it",
        "- width 1023",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "gpu"], "mezzo env: --device gpu is not a torch device; write cpu or cuda."),
        (["--device", "meta"], "mezzo env: --device meta cannot be used here: nothing has values on it; write cpu or cuda."),
        (["--budget-s", "inf"], "mezzo env: --budget-s inf would never end; write a number of seconds."),
        (["--budget-s", "nan"], "mezzo env: --budget-s nan leaves no time to measure; write a positive number."),
        (["--budget-s", "0"], "mezzo env: --budget-s 0.0 leaves no time to measure; write a positive number."),
    ],
)  # fmt: skip
def test_bad_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_terminal_gets_lines_that_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()
    monkeypatch.setenv("COLUMNS", "72")
    with os.fdopen(reader, encoding="utf-8", newline="") as shown, os.fdopen(writer, "w", encoding="utf-8") as terminal:
        said: list[str] = []
        listens = threading.Thread(target=lambda: said.extend(iter(shown.readline, "end\r\n")), daemon=True)
        listens.start()
        with redirect_stdout(terminal):
            assert main(["env", "--device", "cpu", "--budget-s", "0.2"]) == 0
            print("end", flush=True)
        listens.join()
    lines = [line.rstrip() for line in said]
    assert max(map(len, lines)) <= 72 < sum(map(len, lines))
    advice = next(i for i, line in enumerate(lines) if line.startswith("- "))
    assert all(line.startswith(("- ", "  ")) for line in lines[advice:])
    assert " ".join(" ".join(lines).split()).count("widths") >= 1
