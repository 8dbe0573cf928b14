"""Kernels that come with a wheel: the right one for the processor is loaded, only if it is whole, without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.kernels.backends.cpp import build, targets

SRC = Path(targets.__file__).parents[4]
PROGRAM = Path(__file__).parent / "wheel_program.py"
V3, V4 = targets.LEVELS["x86-64-v3"].split(), targets.LEVELS["x86-64-v4"].split()
HERE = next((line.split() for line in build._machine().splitlines() if line.startswith("flags")), [])
needs_level = pytest.mark.skipif(not targets.levels(HERE), reason="this processor is none that wheels are built for")


def test_the_best_processor_first() -> None:
    assert targets.levels([*V4, "sse2"]) == ["x86-64-v4", "x86-64-v3"]
    assert targets.levels(V3) == ["x86-64-v3"]
    assert targets.levels([flag for flag in V3 if flag != "f16c"]) == []


def test_a_name_follows_the_source(tmp_path: Path) -> None:
    source = tmp_path / "op" / "cpu.cpp"
    source.parent.mkdir()
    names = []
    for text in ("int a;", "int b;"):
        source.write_text(text)
        names.append(targets.file_name(source, "x86-64-v3"))
    assert names[0] != names[1] and all(name.startswith("op-x86-64-v3-") for name in names)


def test_a_library_that_is_not_whole_is_known() -> None:
    whole = targets.sealed(b"code")
    assert targets.is_sealed(whole)
    assert not any(map(targets.is_sealed, (whole[:-1], b"x" + whole, b"code", b"")))


@needs_level
def test_what_came_with_the_wheel_is_loaded_if_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = targets.levels(HERE)[-1]
    source = tmp_path / "op" / "cpu.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "BUILT", tmp_path)
    path = targets.compile_into(tmp_path, source, level)
    library = build._carried(source)
    assert library is not None and library.answer() == 42
    content = path.read_bytes()
    path.unlink()  # the file that is loaded stays as it is
    path.write_bytes(content[:-1])
    assert build._carried(source) is None
    monkeypatch.setenv("MEZZO_CXXFLAGS", "-g")
    assert build._carried(source) is None


@needs_level
@pytest.mark.slow
def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    """The package as a wheel has it, no compiler on the path, no cache: the compiled kernels run."""
    shutil.copytree(SRC / "mezzo", tmp_path / "site" / "mezzo", ignore=shutil.ignore_patterns("__pycache__"))
    built = targets.compile_all(tmp_path / "site/mezzo/kernels/backends/cpp/built")
    assert len(built) == len(targets.sources()) * len(targets.LEVELS)
    (tmp_path / "bin").mkdir()
    env = {
        "PATH": str(tmp_path / "bin"),
        "PYTHONPATH": str(tmp_path / "site"),
        "XDG_CACHE_HOME": str(tmp_path / "none"),
    }
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env={**env, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "equal the reference" in done.stdout, done.stderr
    for path in built:
        os.unlink(path)
    done = subprocess.run(command, env={**env, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "no C++ compiler" in done.stderr
