"""The table of docs/migrate/index.md is counted from the loops below it; `python -m tests.docs.test_migrate` prints it."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "index.md"


def loops() -> dict[str, str]:
    """Return the code of each block that has a title."""
    found = re.finditer(r'^```python title="(.+?)"\n(.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {m.group(1): m.group(2) for m in found}


def names(code: str) -> set[str]:
    """Return every variable, attribute and keyword of a program."""
    nodes = list(ast.walk(ast.parse(code)))
    words = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return words | {n.arg for n in nodes if isinstance(n, ast.keyword) and n.arg is not None}


def row(title: str, plain: str, code: str) -> str:
    """Return the row of the table: lines written, lines gone, new names."""
    changes = [line[0] for line in difflib.ndiff(plain.splitlines(), code.splitlines())]
    new = names(code) - names(plain) - {"torch"}
    listed = ", ".join(f"`{name}`" for name in sorted(new))
    return f"| {title} | {changes.count('+')} | {changes.count('-')} | {listed} |"


def rows() -> dict[str, str]:
    plain, *_ = (found := loops()).values()
    return {title: row(title, plain, code) for title, code in list(found.items())[1:]}


def test_the_table_is_counted() -> None:
    page = PAGE.read_text()
    assert [line for line in rows().values() if line not in page] == []


def test_mezzo_has_the_fewest_lines_and_names() -> None:
    counted = {title: line.split("|") for title, line in rows().items()}
    written = {title: int(cells[2]) for title, cells in counted.items()}
    learnt = {title: cells[4].count("`") // 2 for title, cells in counted.items()}
    assert min(written.values()) == written["mezzo"] and min(learnt.values()) == learnt["mezzo"]


if __name__ == "__main__":
    print("\n".join(rows().values()))
