"""Every example runs as it stands, on one process, and those for several ranks on two."""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*number of training batches")
@pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec:FutureWarning", "ignore:.*is_gradient_checkpointing"
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_reaches_what_it_asserts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    runpy.run_path(str(FOLDER / name), run_name="__main__")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_two_ranks_run_it(name: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(FOLDER / name)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_shows_tables(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert any("text/html" in out.get("data", {}) for out in shown)


def test_the_list_of_examples_is_whole() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in (*PROGRAMS, *NOTEBOOKS) if f"({name})" not in listed] == []
