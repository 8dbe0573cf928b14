from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.train.small import emotion_rows, tiny, write_tsv

from mezzo.cli import main
from mezzo.train import run
from mezzo.train.predictor import Predictor

TEXTS = ["furious rage my day", "", "happy delight thing", "weep and grief"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    run(tiny(write_tsv(folder / "emotions.tsv", emotion_rows(120)), folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[str]:
    found = Predictor(str(model))(TEXTS)
    return ["" if one is None else f"{one.label}\t{one.probability:.4f}" for one in found]


def piped(model: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mezzo", "predict", "--model", str(model), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip


def test_a_file_gives_a_line_for_each_line(
    model: Path, wanted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(TEXTS).encode())
    assert main(["predict", "--model", str(model), str(path), "--batch-size", "4"]) == 0
    assert capsys.readouterr().out.split("\n") == [*wanted, ""]


def test_json_lines_hold_the_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    assert main(["predict", "--model", str(model), str(path), "--json", "--policy", "fp32"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["text"] for record in found] == TEXTS
    assert found[1] == {"text": "", "label": None, "probability": None}
    assert all(0 < record["probability"] <= 1 for record in found if record["text"])


def test_in_a_pipe_each_line_is_answered_as_it_comes(
    model: Path, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (asked, ask), (answer, said) = os.pipe(), os.pipe()
    codes: list[int] = []
    command = ["predict", "--model", str(model), "--batch-size", "1"]
    with open(asked, encoding="utf-8") as stdin, open(answer, encoding="utf-8") as answers:
        monkeypatch.setattr(sys, "stdin", stdin)
        with open(said, "w", encoding="utf-8") as stdout, open(ask, "w", encoding="utf-8") as questions:
            monkeypatch.setattr(sys, "stdout", stdout)
            thread = threading.Thread(target=lambda: codes.append(main(command)), daemon=True)
            thread.start()
            for text, line in zip(TEXTS, wanted, strict=True):
                questions.write(text + "\n")
                questions.flush()
                label, _, probability = answers.readline().rstrip("\n").partition("\t")
                assert label == line.partition("\t")[0]
                assert probability == "" or float(probability) == pytest.approx(
                    float(line.partition("\t")[2]), abs=0.01
                )
            questions.close()
            thread.join(60)
        assert answers.read() == "" and codes == [0]


def test_a_closed_standard_input_is_one_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["predict", "--model", str(model)]) == 2
    assert capsys.readouterr().err == (
        "mezzo predict: standard input is closed. Write the path of a file, or give the lines to standard input.\n"
    )


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(model: Path) -> None:
    process = piped(model, "--batch-size", "1", "--policy", "fp32")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("happy\n")
    process.stdin.flush()
    assert process.stdout.readline()
    process.stdout.close()
    process.stdin.write("happy\n" * 2)
    process.stdin.close()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert "Error" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["nix.txt"],
            "the file nix.txt cannot be read: No such file or directory. Write a path, or - for standard input.",
        ),
        (["--model", "./nix"], "no tokenizer for the model './nix'"),
        (["--policy", "bf61"], "Did you mean 'bf16'"),
        (["--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["--max-length", "99"], "max_length=99 is more than the 24 positions of the model"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], complaint: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["predict", "--model", str(model), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mezzo predict: ")
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16LE", "UTF-16BE"])
def test_lines_in_utf16_are_told_how_to_be_read(
    encoding: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_bytes("\n".join(TEXTS).encode(encoding))
    assert main(["predict", "--model", str(model), str(tmp_path / "lines.txt")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    told = f"mezzo predict: {tmp_path / 'lines.txt'} is UTF-16, not UTF-8. Convert it, for example: iconv -f {encoding} -t UTF-8\n"
    assert printed.err == told


def test_lines_before_one_that_is_not_utf8_are_answered(
    model: Path, wanted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes("\n".join(TEXTS).encode() + b"\n\xc4\xe3\n")
    assert main(["predict", "--model", str(model), str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out.split("\n") == [*wanted, ""]
    assert printed.err == f"mezzo predict: line 5 of {path} is not UTF-8: byte 0xc4.\n"
