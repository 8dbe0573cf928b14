"""The benchmarks use the public names of mezzo, as a user would, and the leaves under it."""

from __future__ import annotations

import ast
from pathlib import Path

import mezzo

BENCH = Path(mezzo.__file__).parent / "bench"
ALLOWED = {"errors", "formats", "report", "train", "bench"}


def reached(path: Path) -> set[str]:
    """What a file takes from mezzo outside of bench: folders, and names of mezzo itself."""
    depth = len(path.relative_to(BENCH).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found


def test_public_names_alone() -> None:
    taken = set().union(*(reached(path) for path in BENCH.rglob("*.py"))) - ALLOWED
    assert taken == {"__version__", "autocast", "GradScaler", "keep_memory", "prepare"}
    assert all(hasattr(mezzo, name) for name in taken)
