"""The program that `mypy --strict` reads uses every public name, and the package tells type checkers to look."""

from __future__ import annotations

import ast
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

import mezzo

PROGRAM = Path(__file__).with_name("every_name.py")
HELPERS = {
    "as_flag",
    "check_given",
    "did_you_mean",
    "first_line",
    "interrupt_in",
    "is_out_of_memory",
    "kind_of",
    "listed",
    "misfit_of",
    "plural",
}  # of messages


def used() -> set[str]:
    nodes = list(ast.walk(ast.parse(PROGRAM.read_text(encoding="utf-8"))))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.id for n in nodes if isinstance(n, ast.Name)}


@pytest.mark.parametrize("module", [mezzo, mezzo.diagnose, mezzo.errors], ids=lambda module: module.__name__)
def test_every_public_name_is_used(module: ModuleType) -> None:
    values = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    own = {name for name, value in values.items() if getattr(value, "__module__", "mezzo").startswith("mezzo")}
    inner = {name for name in own if module is not mezzo and isinstance(values[name], ModuleType)}
    assert own - inner - HELPERS - used() == set()


def test_the_package_is_marked_as_typed() -> None:
    assert files("mezzo").joinpath("py.typed").is_file()


def test_a_name_that_does_not_exist_is_an_error_at_run_time() -> None:
    with pytest.raises(AttributeError, match="no attribute 'preparre'"):
        getattr(mezzo, "preparre")  # noqa: B009
