"""docs/api.md lists every public name with the first line of its docstring; `python -m tests.docs.test_api` writes it."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from pathlib import Path
from types import ModuleType

import mezzo

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
SPACES = (
    "mezzo", "mezzo.policy", "mezzo.casting", "mezzo.optim", "mezzo.step", "mezzo.diagnose", "mezzo.distributed", "mezzo.report",
    "mezzo.errors", "mezzo.extras", "mezzo.files", "mezzo.formats",
)  # fmt: skip


def public(module: ModuleType) -> list[str]:
    """Return the names of a folder's contract, or those that a file defines itself."""
    named = {name: getattr(module, name) for name in dir(module) if not name.startswith("_") and name != "annotations"}
    is_folder = hasattr(module, "__path__")
    return sorted(
        name
        for name, value in named.items()
        if not isinstance(value, ModuleType)
        and (is_folder or getattr(value, "__module__", module.__name__) == module.__name__)
    )


def first_line(space: str, name: str) -> str:
    module = importlib.import_module(space)
    value = getattr(module, name)
    is_code = inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))
    doc = inspect.getdoc(value) if is_code else doc_of_value(module, name)
    return (doc or f"a value of type {type(value).__name__}").splitlines()[0]


def doc_of_value(module: ModuleType, name: str) -> str:
    """Return the string below an assignment, in the file that a contract takes the name from; empty if there is none."""
    body = ast.parse(inspect.getsource(module)).body
    for node, after in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(node, ast.ImportFrom) and name in [alias.asname for alias in node.names]:
            return doc_of_value(
                importlib.import_module("." * node.level + (node.module or ""), module.__package__), name
            )
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_it = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if is_it and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return inspect.cleandoc(str(after.value.value))
    return ""


def page() -> str:
    lines = [
        "# Public names",
        "",
        "Made from the docstrings by `python -m tests.docs.test_api`; a test holds it to them.",
    ]
    for space in SPACES:
        module = importlib.import_module(space)
        lines += ["", f"## {space}", "", *(f"- `{n}`: {first_line(space, n)}" for n in public(module))]
    return "\n".join(lines) + "\n"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_public_callable_has_a_docstring() -> None:
    for space in SPACES:
        module = importlib.import_module(space)
        for name in public(module):
            value = getattr(module, name)
            documented = inspect.isclass(value) or inspect.isfunction(value)
            assert not documented or inspect.getdoc(value), f"{space}.{name}"


def test_the_contract_holds_the_names_of_the_design() -> None:
    names = "Policy autocast GradScaler custom_fwd custom_bwd prepare checkpoint_contexts optim diagnose".split()
    assert [name for name in names if not hasattr(mezzo, name)] == []


def test_the_reference_has_what_the_guide_names_in_full() -> None:
    guide = [PAGE.parents[1] / "README.md", *(page for page in PAGE.parent.rglob("*.md") if is_guide(page))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in guide)
    named = set(re.findall(r"(?<![\w/.])(mezzo(?:\.[a-z]\w*)*)\.([A-Za-z]\w*)", text))
    for space, names in re.findall(r"from (mezzo[.\w]*) import ([\w, ]+)", text):
        named |= {(space, name) for name in names.split(", ")}
    known = set(re.findall(r"\w+", (PAGE.parent / "reference.md").read_text(encoding="utf-8")))
    assert {name for space, name in named if is_callable(space, name)} - known == set()


def is_guide(page: Path) -> bool:
    return page.name not in ("log.md", "performance.md", "architecture.md", "api.md") and "decisions" not in page.parts


def is_callable(space: str, name: str) -> bool:
    if space in ("mezzo.errors", "mezzo.cuda.amp"):
        return False  # an error says itself what it is, and the old names are torch's
    if space.startswith("mezzo.integrations"):
        return name[0].isupper()  # importing the frameworks takes seconds
    try:
        value = getattr(importlib.import_module(space), name)
    except (ImportError, AttributeError):
        return False  # of an object, as `mezzo.casting.weight_casts.clear`
    return inspect.isclass(value) or inspect.isfunction(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
