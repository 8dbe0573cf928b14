"""Each line of the table of promises in docs/step.md names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "step.md").read_text(encoding="utf-8")
PROMISES = re.findall(r"^\| (.+?) \| `(test_\w+\.py)(?:::(\w+))?` \|$", PAGE, re.MULTILINE)


def test_every_line_of_the_table_names_a_test() -> None:
    table = PAGE.split("## What is promised")[1].split("\n## ")[0]
    assert len(PROMISES) == sum(line.startswith("|") for line in table.splitlines()) - 2


@pytest.mark.parametrize(("promise", "file", "name"), PROMISES)
def test_the_test_is_there(promise: str, file: str, name: str) -> None:
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert any(test.lower().startswith("test") for test in tests)
    assert not name or name in tests, promise
