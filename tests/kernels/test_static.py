"""Rules that every kernel file keeps, read from the source: device guards, factories, one door for addresses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mezzo

SRC = Path(mezzo.__file__).parent
FILES = [*(SRC / "kernels").rglob("*.py"), *(SRC / "optim").rglob("*.py")]
FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "as_tensor", "eye", "linspace", "rand", "randn"}
DOORS = {"operands.py", "batch.py", "base.py"}


def is_launch(node: ast.AST) -> bool:
    """Whether a node is `kernel[grid](...)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.endswith("_kernel")
    )


def is_guard(node: ast.AST) -> bool:
    """Whether a node is `with on(device):`."""
    return isinstance(node, ast.With) and any(
        isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func) == "on" for item in node.items
    )


def launches(tree: ast.AST, guarded: bool = False) -> Iterator[tuple[int, bool]]:
    """Yield line and guardedness of each launch."""
    for child in ast.iter_child_nodes(tree):
        inside = guarded or is_guard(child)
        if isinstance(child, ast.Call) and is_launch(child):
            yield child.lineno, inside
        yield from launches(child, inside)


def bare_factories(tree: ast.AST) -> list[str]:
    """Return the calls of torch's factories that leave device or dtype to what is set around them."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
    ]
    named = [(call, {keyword.arg for keyword in call.keywords}) for call in calls]
    return [f"{call.lineno}: {ast.unparse(call)}" for call, names in named if not {"device", "dtype"} <= names]


def test_every_triton_launch_is_under_a_device_guard() -> None:
    found = {
        f"{path.relative_to(SRC)}:{line}": guarded
        for path in FILES
        for line, guarded in launches(ast.parse(path.read_text()))
    }
    assert len(found) == 2, "`start` launches for all, a first time and again"
    assert all(found.values()), found


def test_a_launch_without_a_guard_is_seen() -> None:
    source = "def step_():\n    step_kernel[(3,)](x)\n    with on(device):\n        step_kernel[(3,)](x)\n"
    assert list(launches(ast.parse(source))) == [(2, False), (4, True)]


def test_every_factory_names_device_and_dtype() -> None:
    found = {str(path.relative_to(SRC)): bare_factories(ast.parse(path.read_text())) for path in FILES}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_a_bare_factory_is_seen() -> None:
    assert bare_factories(ast.parse("x = torch.empty(3)\ny = torch.zeros((), dtype=d, device=e)")) == [
        "1: torch.empty(3)"
    ]


def takes_addresses(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    return any(isinstance(node, ast.Attribute) and node.attr == "data_ptr" for node in ast.walk(tree))


def test_addresses_are_taken_at_the_door() -> None:
    found = {str(path.relative_to(SRC)) for path in FILES if takes_addresses(path) and path.name not in DOORS}
    assert found == set(), "addresses go to a kernel through kernels/operands.py"
