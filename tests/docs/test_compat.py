"""The README's table of torch versions is that of the stored results."""

from __future__ import annotations

import json
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def program() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "compat.py"))


def test_the_table_is_that_of_the_results() -> None:
    assert program()["table"]() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_table_that_is_old_is_made_anew() -> None:
    compat, page = program(), (ROOT / "README.md").read_text(encoding="utf-8")
    old = page.replace(compat["table"](), compat["HEAD"] + "\n| 1.0.0 | 2.7 | 0 of 27 | 0 | 0 | 0 | 2016 |")
    assert old != page and compat["with_table"](old) == page


def test_a_report_is_counted() -> None:
    report = """<testsuites><testsuite>
      <testcase classname="a" name="fine"/><testcase classname="a" name="wrong"><failure/></testcase>
      <testcase classname="b" name="broken"><error/></testcase><testcase classname="b" name="left"><skipped/></testcase>
    </testsuite></testsuites>"""
    counts, names = program()["counted"](ET.fromstring(report))
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert names == ["a::wrong", "b::broken"]


def test_every_folder_of_tests_is_a_part() -> None:
    parts = program()["parts"]()
    assert {"policy", "step", "docs", "."} <= set(parts)


def test_a_second_python_of_one_torch_has_a_file_of_its_own(tmp_path: Path) -> None:
    stored_as = program()["stored_as"]
    plain = tmp_path / "torch-2.15.0.json"
    assert stored_as("2.15.0", "3.11.7", tmp_path) == plain
    plain.write_text(json.dumps({"python": "3.11.7"}))
    assert stored_as("2.15.0", "3.11.9", tmp_path) == plain
    assert stored_as("2.15.0", "3.1.4", tmp_path).name == "torch-2.15.0-python-3.1.json"
    assert stored_as("2.15.0", "3.14.10", tmp_path).name == "torch-2.15.0-python-3.14.json"
