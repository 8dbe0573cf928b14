"""Imports go one way: down the list of folders in the design, never back."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "mezzo"
ORDER = [
    "errors", "extras", "files", "formats", "_torch", "random_state", "read_only", "stamp", "report", "policy",
    "kernels", "allocator", "casting", "loss_scale", "amp", "cuda", "optim", "distributed", "binding", "trace", "step", "diagnose",
    "integrations", "train", "bench", "cli",
]  # fmt: skip


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, read once for all tests."""
    return ast.parse(source)


def layer(path: Path) -> str | None:
    top = path.relative_to(SRC).parts[0].removesuffix(".py")
    return None if top.startswith("__") else top


def imported_layers(path: Path, source: str) -> set[str]:
    package = ("mezzo", *path.relative_to(SRC).parts[:-1])
    found = set()
    for node in ast.walk(parsed(source)):
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
    assert breaches(SRC / "policy" / "kinds.py", "from ..casting import mode") == [
        "policy/kinds.py (policy) imports casting"
    ]
    assert breaches(SRC / "loss_scale" / "state.py", "def f():\n    import mezzo.step.stepper") != []


def _file_of(parts: tuple[str, ...]) -> Path | None:
    path = SRC.joinpath(*parts)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def imported_files(path: Path, source: str) -> set[Path]:
    """Every file of the package that a file imports, inside functions too."""
    package, found = path.relative_to(SRC).parts[:-1], set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "mezzo"):
            names = tuple(filter(None, (node.module or "").split(".")))
            base = (*package[: len(package) - node.level + 1], *names) if node.level else names[1:]
            found |= {_file_of((*base, alias.name)) or _file_of(base) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {_file_of(tuple(a.name.split(".")[1:])) for a in node.names if a.name.split(".")[0] == "mezzo"}
    return {file for file in found if file is not None and file != path}


def circle(graph: dict[Path, set[Path]]) -> list[str]:
    """The names of files that import each other round about; empty if none do."""
    left = {path: set(imported) for path, imported in graph.items()}
    while free := [path for path, imported in left.items() if not imported & left.keys()]:
        for path in free:
            del left[path]
    while unused := [path for path in left if not any(path in imported for imported in left.values())]:
        for path in unused:
            del left[path]
    return sorted(str(path.relative_to(SRC)) for path in left)


def test_no_file_imports_itself_round_about() -> None:
    files = [path for path in SRC.rglob("*.py") if path.parent != SRC or path.name != "__init__.py"]
    assert circle({path: imported_files(path, path.read_text()) for path in files}) == []


def test_a_circle_is_found_through_an_import_inside_a_function() -> None:
    rule, fields = SRC / "policy" / "kinds.py", SRC / "policy" / "fields.py"
    lazy = imported_files(rule, "def f():\n    from .fields import OpRules")
    assert lazy == {fields}
    assert circle({rule: lazy, fields: {rule}, SRC / "errors.py": set()}) == ["policy/fields.py", "policy/kinds.py"]


KERNELS = SRC / "kernels"
WITHOUT_OPERANDS = {KERNELS / "registry.py", SRC / "allocator.py"}
"""What asks a backend for something else than a step: whether it runs here, and for code that makes torch's blocks."""


def past_the_door(path: Path, source: str) -> list[str]:
    """What in a file goes to a compiled kernel without the checked operands of `kernels/operands`."""
    found, own = [], path.relative_to(SRC)
    reaches = any((KERNELS / "backends") in file.parents for file in imported_files(path, source))
    if reaches and not {KERNELS / "ops", KERNELS / "backends"} & {*path.parents} and path not in WITHOUT_OPERANDS:
        found.append(f"{own} imports a backend")
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "step_" and reaches:
            first = node.args.args[0].annotation
            if first is None or ast.unparse(first) != "Operands":
                found.append(f"{own} steps what was not checked")
    return found


def test_operands_are_the_only_way_to_a_compiled_kernel() -> None:
    assert [fault for path in SRC.rglob("*.py") for fault in past_the_door(path, path.read_text())] == []


def test_a_way_past_the_door_is_found() -> None:
    call = "from mezzo.kernels.backends.cpp.batch import int64s\ndef step_(weights: list[Tensor]): int64s(weights)"
    assert past_the_door(SRC / "optim" / "sgd.py", call) == [
        "optim/sgd.py imports a backend",
        "optim/sgd.py steps what was not checked",
    ]


APPLICATIONS = ("train", "bench", "cli")
API = Path(__file__).parents[1] / "docs" / "api.md"


def public_names() -> dict[str, set[str]]:
    """The names of each folder and file that the page of the API lists, and those an application's `__init__` has."""
    found: dict[str, set[str]] = {"mezzo": {"__version__"}}
    for line in API.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            space = found.setdefault(line[3:], set())
        elif line.startswith("- `"):
            space.add(line.split("`")[1])
    for app in APPLICATIONS:
        tree = ast.parse((SRC / app / "__init__.py").read_text(encoding="utf-8"))
        nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        found[f"mezzo.{app}"] = {alias.asname or alias.name for node in nodes for alias in node.names}
    return found


def private_names(path: Path, source: str, public: dict[str, set[str]]) -> list[str]:
    """What a file of an application takes from mezzo, outside its own folder, that is not public."""
    package, found = ("mezzo", *path.relative_to(SRC).parts[:-1]), []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "mezzo"]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, (node.module or "").split("."))))
            if module.split(".")[0] == "mezzo" and not f"{module}.".startswith(f"mezzo.{package[1]}."):
                taken = {alias.name for alias in node.names}
                found += [f"{module}.{name}" for name in sorted(taken - public.get(module, set()))]
    return [f"{path.relative_to(SRC)} takes {name}" for name in found]


def test_applications_take_public_names_alone() -> None:
    files = [path for app in APPLICATIONS for path in sorted((SRC / app).rglob("*.py"))]
    assert [line for p in files for line in private_names(p, p.read_text(), public_names())] == []


def test_a_private_name_is_found() -> None:
    source = "def f():\n    from ...kernels import mix\n    from ... import prepare\n    import mezzo._torch"
    found = private_names(SRC / "bench" / "workloads" / "recipe.py", source, public_names())
    assert found == [
        "bench/workloads/recipe.py takes mezzo.kernels.mix",
        "bench/workloads/recipe.py takes mezzo._torch",
    ]
    assert private_names(SRC / "cli" / "env.py", "from ..policy import Policy, cast_of", public_names()) == [
        "cli/env.py takes mezzo.policy.cast_of"
    ]


ALLOWED_PAST = {"kernels.operands", "binding.bind", "step.prepare"}
"""Modules that are named after the one function they hold."""


def past_the_contract(path: Path, source: str) -> list[str]:
    """Imports that reach past the `__init__` of another folder."""
    package, found = path.relative_to(SRC).parts[:-1], []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.level and node.module and len(package) - node.level + 1 <= 0:
            top, *rest = node.module.split(".")
            if rest and (not package or top != package[0]) and node.module not in ALLOWED_PAST:
                found.append(f"{path.relative_to(SRC)} imports {node.module}")
    return found


def test_a_folder_is_entered_through_its_contract() -> None:
    files = [path for path in SRC.rglob("*.py") if path.parent != SRC]
    assert [line for path in files for line in past_the_contract(path, path.read_text())] == []


def test_an_import_past_a_contract_is_found() -> None:
    source = "from ..casting.mode import CastMode"
    assert past_the_contract(SRC / "step" / "engine.py", source) == ["step/engine.py imports casting.mode"]
