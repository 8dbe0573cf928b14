"""A benchmark runs the tests of what it times, and refuses on red."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.bench import harness as gate
from mezzo.bench.workload import WORKLOADS, find_workload
from mezzo.errors import BenchError


def test_green_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_green.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    assert gate.run_tests(["test_green.py"], tmp_path).startswith("2 passed")


def test_red_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_red.py").write_text("def test_one(): assert 1 == 2\n")
    with pytest.raises(
        BenchError, match=r"tests of what would be timed do not pass \(1 failed.*--no-check.*pytest test_red.py"
    ):
        gate.run_tests(["test_red.py"], tmp_path)


@pytest.mark.slow  # pytest's own sentence in the place of a red test's
def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no such file|not found|no tests ran"):
        gate.run_tests(["gone.py"], tmp_path)


def test_an_installation_without_tests_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gate, "checkout", lambda: None)
    assert gate.run_tests(["tests"]) == "not run: not a checkout with tests"
    assert gate.run_tests([], tmp_path) == "not run: the workload names none"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_names_tests_that_exist(name: str) -> None:
    root = gate.checkout()
    assert root is not None
    paths = find_workload(name).tests
    assert paths
    assert [path for path in paths if not (root / path).exists()] == []
