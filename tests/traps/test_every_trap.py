"""No trap is without a test, and none is without its case on stock torch unless a reason is written down here."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

TRAPS = [*range(1, 38), "1b", "3b"]
"""The numbers of the silent traps; 1b and 3b are variants."""

NO_STOCK_CASE = {
    "22": "torch divides before it updates; the trap is another system's order",
    "23": "a static scale left on is another system's option",
    "24": "torch has no guard for bf16 that could skip",
    "25": "a flag that is accepted and ignored is another system's",
    "36": "torch has no fp8 training in tree",
    "37": "a model loader's default, not torch's",
}


def sides_by_trap(folder: Path) -> dict[str, set[str]]:
    """Return trap number to the sides ("stock", "ours") it is tested on."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_s"):
                number, _, rest = node.name.removeprefix("test_s").partition("_")
                sides = {rest.split("_")[0]} & {"stock", "ours"}
                found[number] |= sides or {"stock", "ours"}  # one test parametrized over both
    return found


def test_every_trap_has_its_end() -> None:
    found = sides_by_trap(Path(__file__).parent)
    assert {number for number, sides in found.items() if "ours" in sides} == {str(number) for number in TRAPS}


def test_every_trap_is_shown_on_stock_torch_or_has_a_reason() -> None:
    found = sides_by_trap(Path(__file__).parent)
    without = {number for number, sides in found.items() if "stock" not in sides}
    assert without == NO_STOCK_CASE.keys()


def test_a_missing_trap_is_seen(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_s4_ours_x(): ...\ndef test_s5_stock_y(): ...\n")
    assert sides_by_trap(tmp_path) == {"4": {"ours"}, "5": {"stock"}}
