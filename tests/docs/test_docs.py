"""Every Python block of the documentation runs as it stands, every docstring example gives what it shows."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mezzo
from mezzo.cli.completion import words_after
from mezzo.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")]
    if "```python" in page.read_text(encoding="utf-8")
)
MODULES = sorted(m.name for m in pkgutil.walk_packages(mezzo.__path__, "mezzo.") if m.name != "mezzo.__main__")


def blocks(text: str) -> list[tuple[int, str]]:
    """Return (first line, code) for each fenced Python block."""
    found = re.finditer(r"^```python(?: [^\n]*)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: m.start(1)].count("\n") + 1, m.group(1)) for m in found]


@pytest.fixture
def accelerate_starts_anew() -> Iterator[None]:
    """Let a page choose its precision: Accelerate keeps the first of a process."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.mark.usefixtures("accelerate_starts_anew")
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*number of training batches")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__docs__"}
    for line, code in blocks(page.read_text(encoding="utf-8")):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


def test_a_broken_block_is_found() -> None:
    text = "# page\n\n```python\nx = 1\nassert x == 2\n```\n"
    ((line, code),) = blocks(text)
    assert line == 4
    with pytest.raises(AssertionError):
        exec(code, {})


def has_examples(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and ">>> " in Path(str(spec.origin)).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*filter(has_examples, MODULES)])
def test_docstring_examples(name: str) -> None:
    failed, _ = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0


def test_every_module_can_be_imported() -> None:
    has_triton = importlib.util.find_spec("triton") is not None
    for name in MODULES:
        if has_triton or "triton" not in name:
            importlib.import_module(name)


def test_the_table_of_peak_memory_is_the_stored_one() -> None:
    stored = (ROOT / "benchmarks" / "results" / "memory_by_size.txt").read_text(encoding="utf-8")
    table = "\n".join(line for line in stored.splitlines() if line.startswith("|"))
    assert table.count("\n") == 6
    assert table in (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_extras_that_the_readme_names_exist() -> None:
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    known = set(re.findall(r"^(\w+) = \[", section.split("\n[")[0], re.MULTILINE))
    named = set(re.findall(r"\[(\w+)\](?:'`|`)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"lightning", "accelerate", "transformers"} <= named <= known


def test_options_that_the_pages_name_exist() -> None:
    others = {"--standalone", "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"}  # torchrun's
    others |= {"--against", "--every"}  # of programs in benchmarks
    known = {word for command in COMMANDS for word in words_after(command)} | others
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/migrate/*.md")]:
        if page.name not in ("log.md", "performance.md"):
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text(encoding="utf-8")))
            assert named <= known, f"{page.name}: {sorted(named - known)}"
