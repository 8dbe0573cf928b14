"""Compiled kernels: only code of this user that is whole is loaded, and nothing about the cache stops a training run."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo import files as files_module
from mezzo.errors import ConfigError
from mezzo.kernels import registry
from mezzo.kernels.backends.cpp import build, kernel_cache
from mezzo.kernels.ops import adamw as adamw_reference

SEVEN = 'extern "C" int answer() { return 7; }'
EVIL = 'extern "C" int answer() { return 666; }'
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path))
    yield
    for cached in (build._library, kernel_cache.fresh, kernel_cache._warn_of, registry.choose):
        cached.cache_clear()
    registry._warned.clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "seven" / "cpu.cpp"
    path.parent.mkdir()
    path.write_text(SEVEN)
    return path


def built(source: Path) -> int:
    """Return what a kernel answers that is looked up, and compiled if need be, as in a new process."""
    build._library.cache_clear()
    library = build.library(source)
    try:
        return int(library.answer())
    finally:
        _ctypes.dlclose(library._handle)


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "mezzo").iterdir())


def plant(path: Path) -> None:
    """Put code that is whole, but somebody else's, where a kernel lies."""
    code = path.with_suffix(".evil")
    subprocess.run(["g++", "-shared", "-fPIC", "-xc++", "-", "-o", code], input=EVIL.encode(), check=True)
    path.unlink(missing_ok=True)
    kernel_cache.store(path.parent, path.name, code.read_bytes())
    code.unlink()


def test_what_is_compiled_is_kept_private_and_whole(source: Path, tmp_path: Path) -> None:
    assert built(source) == 7
    (path,) = files(tmp_path)
    assert (path.suffix, stat.S_IMODE(path.stat().st_mode)) == (".so", 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    plant(path)
    assert built(source) == 666, "the plant has to be good for the tests below"


def test_what_was_compiled_once_needs_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(source) == 7
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setenv("PATH", "")
    assert built(source) == 7


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "foreign", "link", "folder"])
def test_a_file_that_is_not_whole_is_compiled_anew(source: Path, tmp_path: Path, damage: str) -> None:
    assert built(source) == 7
    (path,) = files(tmp_path)
    code = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere.so").write_bytes(code)
        path.symlink_to(tmp_path / "elsewhere.so")
    elif damage == "folder":
        path.mkdir()
    else:
        flipped = code[:5000] + bytes([code[5000] ^ 1]) + code[5001:]
        path.write_bytes({"cut": code[: len(code) // 2], "empty": b"", "flipped": flipped, "foreign": b"text"}[damage])
    assert built(source) == 7
    if damage != "folder":
        assert path.read_bytes() == code
        assert not path.is_symlink()


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
@pytest.mark.parametrize("whose", ["folder", "file"])
def test_the_code_of_another_user_is_not_loaded(
    source: Path, tmp_path: Path, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert built(source) == 7
    (path,) = files(tmp_path)
    plant(path)
    os.chown(path, 1234, 1234)
    if whose == "folder":
        os.chown(path.parent, 1234, 1234)
    assert built(source) == 7
    assert "is not used for compiled kernels: user 1234 owns it, and this process runs as 0" in caplog.text


@pytest.mark.parametrize("which", ["folder", "file"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_what_others_may_write_is_not_loaded(
    source: Path, tmp_path: Path, which: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert built(source) == 7
    (path,) = files(tmp_path)
    plant(path)
    (path.parent if which == "folder" else path).chmod(mode)
    assert built(source) == 7
    assert "others may write to it" in caplog.text
    assert stat.S_IMODE((tmp_path / f"mezzo-{os.geteuid()}").stat().st_mode) == 0o700 if which == "folder" else True


def test_without_a_home_and_with_an_unknown_user(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert built(source) == 7
    assert [path.suffix for path in (tmp_path / f"mezzo-{os.geteuid()}").iterdir()] == [".so"]


def test_a_cache_that_cannot_be_made_gives_way_to_a_folder_that_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert built(source) == 7
    assert len(list((tmp_path / f"mezzo-{os.geteuid()}").iterdir())) == 1
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert built(source) == 7


def no_room(*args: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["write", "fsync", "rename", "scratch"])
def test_a_full_disk_is_a_reason_and_no_error(
    source: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, name = {
        "write": (files_module, "open"), "fsync": (kernel_cache.os, "fsync"), "rename": (kernel_cache.os, "replace"),
        "scratch": (build.tempfile, "TemporaryDirectory"),
    }[where]  # fmt: skip
    monkeypatch.setattr(target, name, no_room, raising=False)
    with pytest.raises(build.NativeBuildError, match="No space left on device") as refused:
        built(source)
    assert refused.value.remedy.startswith("Set CXX")
    assert [path for folder in tmp_path.rglob("mezzo*") for path in folder.glob("*.so")] == []


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cxx"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("printf 'b\\377d error \\303' >&2; exit 1", "does not compile it: b\ufffdd error"),
        ("exit 0", "No such file or directory"),
        ("kill -9 $$", "does not compile it"),
        ('for last; do :; done; echo junk > "$last"', "does not load"),
    ],
)
def test_a_compiler_that_fails_is_a_reason(
    source: Path, tmp_path: Path, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, text))
    with pytest.raises(build.NativeBuildError, match=words):
        built(source)


def test_what_does_not_compile_is_reported(source: Path, tmp_path: Path) -> None:
    source.write_text("int f( {")
    with pytest.raises(build.NativeBuildError, match=r"does not compile it: .*error"):
        built(source)
    assert files(tmp_path) == []


def test_the_processor_and_the_flags_are_part_of_the_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(source)
    monkeypatch.setattr(build, "_machine", lambda: "another")
    built(source)
    for flags in ("-O1", "-DNAME=\udcff"):  # the latter is a byte that no text holds
        monkeypatch.setenv("MEZZO_CXXFLAGS", flags)
        built(source)
    assert len(files(tmp_path)) == 4


def test_processes_that_compile_at_once_leave_one_whole_file(source: Path, tmp_path: Path) -> None:
    program = f"from pathlib import Path; from mezzo.kernels.backends.cpp.build import library; print(library(Path({str(source)!r})).answer())"
    runs = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    assert [run.communicate()[0].strip() for run in runs] == [b"7"] * 2
    (path,) = files(tmp_path)
    assert ctypes.CDLL(str(path)).answer() == 7


def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)


BREAKAGES: list[Callable[[pytest.MonkeyPatch, Path], None]] = [
    broken,
    lambda monkeypatch, tmp_path: monkeypatch.setattr(kernel_cache.os, "open", no_room),
    lambda monkeypatch, tmp_path: monkeypatch.setenv("CXX", script(tmp_path, "exit 3")),
]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=["no compiler", "no room", "broken compiler"])
def test_training_goes_on_in_the_reference_with_one_warning(
    breakage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mezzo.optim import SGD, AdamW

    breakage(monkeypatch, tmp_path)
    build._library.cache_clear()
    registry.choose.cache_clear()
    for kind in (SGD, AdamW):
        for dtype in (torch.float32, torch.bfloat16):
            p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
            optimizer = kind([p], lr=0.5, master="split")
            p.grad = torch.ones_like(p)
            optimizer.step()
            assert float(p.detach()[0]) < 1.0
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert "run in plain torch, not in compiled kernels: " in warned[0].getMessage()
    assert "CXX" in warned[0].getMessage()


def test_without_a_compiler_the_reference_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build._library.cache_clear()
    registry.choose.cache_clear()
    cpu = torch.device("cpu")
    assert registry.why("adamw", cpu, torch.bfloat16) == (
        "adamw on cpu bf16: reference, not cpu: no C++ compiler (g++, clang++, or the one that CXX names); "
        "not triton: it is for CUDA; not fused: torch has none for CPU"
    )
    assert registry.choose("adamw", cpu, torch.bfloat16).module is adamw_reference
    with pytest.raises(ConfigError) as refused:
        registry.choose("adamw", cpu, torch.bfloat16, "cpu")
    assert str(refused.value) == (
        "backend='cpu' was asked for adamw on cpu bf16: no C++ compiler (g++, clang++, or the one that CXX names). "
        "Write backend='auto'."
    )


def test_a_source_that_cannot_be_read_is_a_reason_and_no_error(tmp_path: Path) -> None:
    """As in a zip file, or in a program that was frozen without its data."""
    (archive := tmp_path / "app.zip").write_bytes(b"")
    with pytest.raises(
        build.NativeBuildError, match=r"their source cannot be read \(Not a directory: '.*app\.zip.*'\)"
    ) as refused:
        build.library(archive / "mezzo" / "cpu.cpp")
    assert refused.value.remedy == "Install mezzo as files, .cpp and .h among them."
    with pytest.raises(build.NativeBuildError, match="No such file"):
        build.library(tmp_path / "cpu.cpp")
