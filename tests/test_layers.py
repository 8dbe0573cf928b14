"""Imports go one way: down the list of folders in the design, never back."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "mezzo"
RENAMED = ("dist", "scaling")  # raise an error that names the new word
ORDER = [
    "errors", "files", "formats", "_torch", "policy", "casting", "kernels", "loss_scale", "cuda", "optim", "distributed",
    "binding", "step", "diagnose", "integrations", "train", "bench", "cli",
]  # fmt: skip


def layer(path: Path) -> str | None:
    top = path.relative_to(SRC).parts[0].removesuffix(".py")
    return None if top.startswith("__") or top in RENAMED else top


def imported_layers(path: Path, source: str) -> set[str]:
    package = ("mezzo", *path.relative_to(SRC).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module or "").split(".")) if node.module else base
            names = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "mezzo" and len(name) > 1}
    return found & set(ORDER)


def breaches(path: Path, source: str) -> list[str]:
    own = layer(path)
    if own is None:
        return []
    return [
        f"{path.relative_to(SRC)} ({own}) imports {other}"
        for other in sorted(imported_layers(path, source))
        if ORDER.index(other) > ORDER.index(own)
    ]


def test_every_folder_is_a_layer() -> None:
    assert {layer(p) for p in SRC.rglob("*.py")} - {None} <= set(ORDER)


def test_imports_go_one_way() -> None:
    assert [b for p in sorted(SRC.rglob("*.py")) for b in breaches(p, p.read_text())] == []


def test_a_breach_is_found() -> None:
    assert breaches(SRC / "policy" / "rule.py", "from ..casting import mode") == [
        "policy/rule.py (policy) imports casting"
    ]
    assert breaches(SRC / "loss_scale" / "state.py", "def f():\n    import mezzo.step.stepper") != []
