"""Nothing is made fp64 on a device that may have none, as Apple's GPUs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "mezzo"
ON_THE_HOST = {
    "formats.py": "`widest`, which asks the device",
    "kernels/ops/gradients/__init__.py": "where the host looks: the CPU",
    "distributed/rank_consistency.py": "numbers that were copied to the CPU",
    "train/evaluate.py": "predictions that were copied to the CPU",
    "binding/hand_written.py": "values that a module is tried with on the CPU",
}
"""Files that compute in fp64, and why they may."""


def makes_fp64(source: str) -> list[int]:
    """Return the lines that ask torch for fp64 values: `x.double()`, `x.to(torch.float64)`, `dtype=torch.float64`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_wide(node, node.func.attr)
    ]


def _is_wide(call: ast.Call, name: str) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
    given += call.args if name == "to" else []
    return name == "double" or any(ast.unparse(value) in ("torch.float64", "torch.double") for value in given)


def test_fp64_is_asked_for_on_the_host_alone() -> None:
    found = {str(path.relative_to(SRC)): makes_fp64(path.read_text()) for path in SRC.rglob("*.py")}
    found = {name: lines for name, lines in found.items() if lines and not name.startswith("bench/")}
    assert found.keys() <= ON_THE_HOST.keys(), found


@pytest.mark.parametrize("source", ["x.double()", "x.to(torch.float64)", "torch.zeros(3, dtype=torch.float64)"])
def test_it_is_seen(source: str) -> None:
    assert makes_fp64(source) == [1] and makes_fp64("x.to(widest(x.device))") == []
