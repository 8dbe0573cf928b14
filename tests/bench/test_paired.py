"""Before and after: the code of two checkouts in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.bench.script import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "paired.py"


@pytest.mark.slow
def test_a_checkout_beside_itself() -> None:
    words = [".", ".", "recipe", "--quick", "--rounds", "2", "--variants", "fp32", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])["found"]
    assert [(row["variant"], len(row["seconds"])) for row in found] == [("fp32", 2)]
    assert found[0]["low"] <= found[0]["ratio"] <= found[0]["high"]


@pytest.fixture(scope="module")
def paired() -> Any:
    return load_script("paired")


def test_a_checkouts_own_name_of_a_variant(paired: Any, tmp_path: Path) -> None:
    old = tmp_path / "mezzo" / "bench"
    old.mkdir(parents=True)
    (old / "variant.py").write_text('Variant(name="mezzo-prepared")')
    assert paired.name_there(tmp_path, "prepare-master") == "mezzo-prepared"
    assert paired.name_there(ROOT / "src", "prepare-master") == "prepare-master"
    assert paired.name_there(tmp_path, "prepare") == "prepare"


def test_a_point_that_does_not_exist_is_told_before_anything_starts(
    paired: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paired.py", ".", ".", "step", "--points", "1e+07"])
    with pytest.raises(SystemExit):
        paired.main()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("--points 1e+07: step has no such point, but '1e+07 parameters', '1e+08 parameters'.\n")
