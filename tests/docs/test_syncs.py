"""Every public function with a Tensor in its signature says in its docstring whether it waits for the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mezzo

ROOT = Path(mezzo.__file__).parent
WORDS = ("Syncs:", "Host only")


def silent(text: str) -> list[str]:
    """Return the public functions of a source that take or return tensors and do not say whether they sync."""
    return [
        name
        for name, function in _functions(ast.parse(text), "")
        if _names_a_tensor(function) and not any(word in (ast.get_docstring(function) or "") for word in WORDS)
    ]


def _functions(scope: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not _is_overload(node):
            yield prefix + node.name, node


def _is_overload(function: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in function.decorator_list)


def _names_a_tensor(function: ast.FunctionDef) -> bool:
    given = function.args
    each = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    notes = [function.returns, *(one.annotation for one in each if one is not None)]
    return any(isinstance(n, ast.Name) and n.id == "Tensor" for note in notes if note for n in ast.walk(note))


def found() -> list[str]:
    every = {path.relative_to(ROOT): silent(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    return [f"{place}: {name}" for place, names in every.items() for name in names]


def test_everything_says_whether_it_syncs() -> None:
    assert found() == []


def test_a_function_that_says_nothing_is_seen() -> None:
    source = 'def f(x: Tensor) -> None:\n    """Do it."""\n\nclass A:\n    def g(self) -> list[Tensor]:\n        """Do it. Syncs: no."""\n'
    assert silent(source) == ["f"]


if __name__ == "__main__":
    print(*found(), sep="\n")
