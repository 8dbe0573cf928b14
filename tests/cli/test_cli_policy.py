"""`mezzo policy`: what it prints, what a program reads, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.cli import main
from mezzo.policy import PRESETS, Policy
from mezzo.policy.table import known_ops, op_table

TEXT = "fp16, *.[n]orm*=fp32, op:cumsum=low, output=bf16"


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["policy", *words]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_show_says_where_each_setting_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", TEXT) == (
        """\
policy: fp16, output=bf16, op:cumsum=low, *.[n]orm*=fp32

setting                  value    written
compute                  fp16     preset fp16
params                   fp32     preset fp16
master                   none     preset fp16
grads                    none     preset fp16
reduce                   fp32     preset fp16
state                    fp32     preset fp16
output                   bf16     edit 1
loss                     fp32     preset fp16
ops                      torch    preset fp16
scaling                  dynamic  preset fp16
scaling.init_scale       65536    preset fp16
scaling.growth_factor    2        preset fp16
scaling.backoff_factor   0.5      preset fp16
scaling.growth_interval  2000     preset fp16
scaling.min_scale        1        preset fp16
scaling.max_scale        none     preset fp16
scaling.hysteresis       1        preset fp16
scaling.dynamic          true     preset fp16
guard.enabled            true     preset fp16
guard.on_overflow        skip     preset fp16
guard.patience           25       preset fp16
guard.restore_buffers    true     preset fp16
guard.check_every        1000     preset fp16

kind         rule                        written
op rule      cumsum=low                  edit 2
module rule  ?LayerNorm=fp32_low_out     preset fp16
module rule  ?GroupNorm=fp32_low_out     preset fp16
module rule  ?*RMSNorm=fp32_low_out      preset fp16
module rule  ?*T5LayerNorm=fp32_low_out  preset fp16
module rule  *.[n]orm*=fp32              edit 3
"""
    )


def test_show_without_a_policy_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "show").splitlines()
    assert lines[0].split() == ["setting", *PRESETS]
    table = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert table["master"] == ["none", "none", "none", "fp32", "split", "none"]
    assert table["compute"] == ["fp32", "fp16", "bf16", "fp16", "bf16", "auto"]
    assert lines[-1].split() == ["module", "rules", "0", "4", "4", "4", "4", "4"]
    assert json.loads(run(capsys, "show", "--json")) == {name: preset.to_dict() for name, preset in PRESETS.items()}


def test_show_says_what_auto_means_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", "auto").splitlines()[-1] == f"on cpu: {PRESETS['auto'].resolve('cpu')}"


def test_show_of_scaling_that_an_edit_switched_on(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "show", "bf16, scaling=dynamic, guard.patience=3").splitlines()
    assert "scaling.init_scale       65536    edit 1" in lines
    assert "guard.patience           3        edit 2" in lines


def test_json_is_the_plain_form(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "show", TEXT, "--json"))
    assert document.pop("text") == str(Policy.parse(TEXT))
    assert Policy.from_dict(document) == Policy.parse(TEXT)


def test_a_path_is_a_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "p.toml")
    Policy.parse(TEXT).save(path)
    assert run(capsys, "diff", path, TEXT) == f"no difference: {Policy.parse(TEXT)}\n"


@pytest.mark.parametrize("name", ["torch", "mezzo"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ops_lists_every_row(capsys: pytest.CaptureFixture[str], name: str, device: str) -> None:
    words = ("ops", "--table", name, "--device", device)
    rows = {row.op: row for row in op_table(name, device).values()}  # type: ignore[arg-type]  # a table's name
    listed = {entry["op"]: entry for entry in json.loads(run(capsys, *words, "--json"))}
    assert {op: entry["rule"] for op, entry in listed.items()} == {op: str(row.rule) for op, row in rows.items()}
    lines = run(capsys, *words).splitlines()
    assert len(lines) == 1 + len(rows)
    for line in lines[1:]:
        row = rows[line.split()[0]]
        assert line.split()[1] == str(row.rule)
        assert row.reason in line
        assert (row.instead or "") in line


def test_why_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy.parse(TEXT)
    assert run(capsys, "why", TEXT, "a.norm", "--op", "softmax") == f"{policy.why('a.norm', 'softmax')}\n"
    assert run(capsys, "why", TEXT) == f"{policy.why(None)}\n"
    printed = run(capsys, "why", TEXT, "ln", "--class-name", "MyNorm", "LayerNorm", "--json")
    answer = json.loads(printed)
    assert answer["winner"] == {"text": "?LayerNorm=fp32_low_out", "written": "preset fp16", "why": ""}
    assert answer["precision"] == "fp32, result fp16"
    assert main(["policy", "why", "bf16", "--class-name", "LayerNorm", "encoder.norm"]) == 2
    assert "'encoder.norm' is none. Write the module before the options." in capsys.readouterr().err
    assert main(["policy", "why", "bf16", "--class-name", "LayerNorm", "head"]) == 2
    assert "'head' is none. Write the module before the options." in capsys.readouterr().err
    for classes in (["MyNorm", "LayerNorm"], ["layer_norm"], ["MyNorm", "_Norm"]):
        assert f"class {classes[0]} on" in run(capsys, "why", "bf16", "--class-name", *classes)
    cuda = json.loads(run(capsys, "why", "fp16", "--op", "softmax", "--device", "cuda", "--json"))
    assert cuda["winner"]["written"] == "torch table, cuda"


def test_diff_tells_a_difference_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "diff", "fp16", "FP16") == "no difference: fp16\n"
    assert run(capsys, "diff", "fp16", "bf16", code=1) == f"{Policy.parse('fp16').diff('bf16')}\n"
    changes = json.loads(run(capsys, "diff", "fp16", "bf16", "--json", code=1))["changes"]
    assert changes[0] == {"what": "compute", "left": "fp16", "right": "bf16"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "bf61"], "cannot parse policy 'bf61' at position 0: unknown preset 'bf61'. Did you mean 'bf16'?"),
        (["why", "bf16", "x", "--op", "softmx"], "unknown op 'softmx'. Did you mean 'softmax'?"),
        (
            ["why", "bf16", "--op", "nosuchop"],
            f"unknown op 'nosuchop'. None of the {len(known_ops()):,} valid ones is like it.",
        ),
        (["diff", "bf16", "absent.toml"], "cannot read the policy file 'absent.toml': No such file or directory."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["policy", *words]) == 2
    assert capsys.readouterr().err == f"mezzo policy: {message}\n"


def test_what_is_no_terminal_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows longer than 80 columns stay whole, and no colour codes are sent."""
    printed = run(capsys, "ops", "--table", "mezzo")
    assert max(map(len, printed.splitlines())) > 80
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    "words",
    [pytest.param(["ops", "--table", "mezzo"], marks=pytest.mark.slow), ["why", "bf16"]],
    ids=["long", "short"],
)
def test_a_pipe_that_closes_early_is_no_error(words: list[str]) -> None:
    """A short output stays in a buffer until the end; a long one does not."""
    shown = subprocess.run(
        [sys.executable, "-c", CLOSED_PIPE, *COMMAND, *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert (shown.stdout, shown.stderr) == ("141\n", "")


@pytest.mark.parametrize(("word", "usage"), [("show", "[-h] [POLICY]"), ("why", "POLICY [MODULE]")])
def test_help_says_what_stands_for_a_word_that_is_left_out(
    word: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["policy", word, "--help"])
    place = capsys.readouterr().out.partition("-h, --help")[0]
    assert usage in place and "(default: " in place and "None" not in place


COMMAND = [sys.executable, "-m", "mezzo", "policy"]
CLOSED_PIPE = """
import os, subprocess, sys
read, write = os.pipe()
os.close(read)
print(subprocess.run(sys.argv[1:], stdout=write).returncode)
"""
