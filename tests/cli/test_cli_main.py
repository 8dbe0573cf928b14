"""The `mezzo` command itself: usage and version at once, extras that are missing, completion, one sentence for bad input."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mezzo
from mezzo.cli import main
from mezzo.cli.completion import script
from mezzo.cli.main import COMMANDS
from mezzo.extras import EXTRAS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BLOCKED = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked!r} else find(name, path, target)
PathFinder.find_spec = classmethod(find_spec)
{code}
"""


def without(packages: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that cannot import some packages."""
    text = BLOCKED.format(blocked=packages, code=code)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)


def test_usage_and_version_need_nothing_heavy() -> None:
    code = """
from mezzo.cli import main
assert main([]) == main(["--help"]) == main(["--version"]) == 0 and main(["trian"]) == 2
assert not {"torch", "numpy", "tyro", "rich"} & set(sys.modules), sorted(sys.modules)
"""
    ended = without({"torch", "numpy", "tyro", "rich"}, code)
    assert ended.returncode == 0, ended.stderr
    assert f"mezzo {mezzo.__version__}" in ended.stdout and "Did you mean 'train'" in ended.stderr
    assert all(name in ended.stdout for name in COMMANDS)


def test_help_may_be_written_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words, option in ((["help"], ["--help"]), (["help", "completion"], ["completion", "--help"])):
        codes = [main(words), main(option)]
        half = (text := capsys.readouterr().out)[: len(text) // 2]
        assert codes[0] == codes[1] and half * 2 == text != ""


def test_the_package_is_a_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "mezzo", "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"mezzo {mezzo.__version__}\n")


@pytest.mark.parametrize("words", [[], ["--version"]], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ended = subprocess.run(
            [sys.executable, "-m", "mezzo", *words], stdout=pipe, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.packages])
def test_a_command_whose_extra_is_missing_says_which_before_it_begins(name: str) -> None:
    ended = without({*EXTRAS, "torch"}, f"from mezzo.cli import main; sys.exit(main([{name!r}, 'x']))")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"mezzo {name}: the command {name} needs the package")
    assert "pip install 'mezzo[cli" in ended.stderr and ended.stderr.count("\n") == 1


def outside_the_base() -> set[str]:
    """Return the modules here of packages that `pip install mezzo` alone does not bring; numpy is one that torch does without."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base, waiting = {"mezzo"}, [Requirement(line) for line in project["dependencies"]]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name not in base and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            base.add(name)
            waiting += map(Requirement, metadata.requires(name) or ())
    found = metadata.packages_distributions()
    return {module for module, brought_by in found.items() if base.isdisjoint(map(canonicalize_name, brought_by))}


def test_the_base_alone_trains_prints_reports_and_saves_policies(tmp_path: Path) -> None:
    """And loads the tools only when a run stops, or when they are asked for."""
    code = f"""
import torch, mezzo
stops = torch.nn.Linear(2, 1)
amp = mezzo.prepare(stops, torch.optim.SGD(stops.parameters(), lr=0.1), "fp32, guard.patience=1")
assert "mezzo.diagnose" not in sys.modules
amp.backward(stops(torch.full((1, 2), float("inf"))).sum())
try:
    amp.step()
except mezzo.errors.NonFiniteStep as error:
    print("why:", error.report.faults[0].verdict)
net = torch.nn.Linear(4, 2)
amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16, output=fp32")
with mezzo.diagnose.trace(net) as trace:
    amp.backward(net(torch.ones(3, 4)).square().mean())
    amp.step()
print(trace.report)
print(amp.report())
batch = torch.ones(3, 4)
print(mezzo.diagnose.explain(torch.nn.Linear(4, 2), batch, "bf16, output=fp32"))
mezzo.Policy.parse("bf16").save({str(tmp_path / "p.toml")!r})
assert mezzo.Policy.load({str(tmp_path / "p.toml")!r}) == mezzo.Policy.parse("bf16")
try:
    mezzo.diagnose.explain(torch.nn.Linear(4, 2), batch, "bf16, output=fp32").to_html({str(tmp_path / "p.html")!r})
except mezzo.errors.ConfigError as error:
    print("said:", error)
"""
    ended = without({*EXTRAS, *outside_the_base()}, code)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "why: inherited\n" in ended.stdout
    assert "said: to_html needs the package jinja2: pip install 'mezzo[report]'." in ended.stdout


def test_completion_knows_every_command_and_its_options() -> None:
    text = script("bash")
    assert all(name in text for name in COMMANDS)
    assert "--micro-batches" in text and "--schedule" in text and "--max-length" in text and "--html" in text
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    asked = f"{text}\nCOMP_WORDS=(mezzo pol); COMP_CWORD=1; _mezzo; echo ${{COMPREPLY[0]}}"
    found = subprocess.run(["bash", "-c", asked], text=True, capture_output=True, check=False)
    assert found.stdout.split() == ["policy"]
    assert main(["completion", "tcsh"]) == main(["completion", "bash", "zsh"]) == 2


def test_every_public_name_is_found_and_listed() -> None:
    for name in (
        "prepare",
        "autocast",
        "GradScaler",
        "Policy",
        "Rule",
        "ScalingConfig",
        "Stepper",
        "StepResult",
        "monitor",
    ):
        assert getattr(mezzo, name) is not None and name in dir(mezzo)
    with pytest.raises(AttributeError, match="has no attribute 'perpare'"):
        _ = mezzo.perpare  # type: ignore[attr-defined]


HELPS = [
    *COMMANDS, "bench recipe", "bench reviews", "policy show", "policy ops", "policy why", "policy diff",
]  # fmt: skip


@pytest.mark.parametrize("words", ["", *HELPS])
def test_help_fits_80_columns_and_truncates_nothing(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([*words.split(), "--help"])
    told = capsys.readouterr().out
    assert "usage: mezzo" in told and "…" not in told
    assert [line for line in told.splitlines() if len(line) > 80 and not line.startswith("usage:")] == []
