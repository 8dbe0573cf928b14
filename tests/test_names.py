"""One noun, one meaning: a class has its name to itself, and so has a file."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "mezzo"
TORCHS_OWN = {"GradScaler", "autocast", "Trainer"}
"""Names of torch and transformers, repeated where a user of theirs looks for them."""
ROLES = {"__init__.py", "cpu.py", "triton.py", "fused.py"}
"""One of each for every kernel. A file of `cli` is called after its command."""


def shared(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Return the names that more than one file has, and the files."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, path in names:
        found[name].append(str(path.relative_to(SRC)))
    return {name: sorted(paths) for name, paths in found.items() if len(paths) > 1}


def classes() -> list[tuple[str, Path]]:
    return [
        (node.name, path)
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def test_no_two_classes_have_one_name() -> None:
    assert {name: paths for name, paths in shared(classes()).items() if name not in TORCHS_OWN} == {}


def test_no_two_files_have_one_name() -> None:
    files = [(path.name, path) for path in SRC.rglob("*.py") if path.parent.name != "cli" and path.name not in ROLES]
    assert shared(files) == {}
