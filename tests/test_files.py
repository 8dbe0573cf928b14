"""A file is whole or what it was, whatever happens while it is written."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from mezzo.errors import ConfigError, DataError
from mezzo.files import as_path, check_writable, replacing, write_atomically, write_text


@pytest.mark.parametrize(
    "given", ["a.toml", Path("a"), Path(), "/", "漢" * 85, "a" * 255, "b\udcff", "~", "a\\b", "." * 255 + "/x"]
)
def test_what_a_file_can_be_called_is_a_path(given: str | Path) -> None:
    assert as_path("save", "path", given) == Path(given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "save was given NoneType for path; give a path."),
        (3, "save was given int for path; give a path."),
        ("", "save was given '' for path, which no file can be called: it is empty."),
        (b"a", "save was given bytes for path; give a path."),
        (Path, "save was given the class Path for path; give a path."),
        ("a\0", "save was given 'a\\x00' for path, which no file can be called: it holds a NUL character."),
        ("\ud83d", "save was given '\\ud83d' for path, which no file can be called: it holds half of a character."),
        ("a/" + "b" * 256, "a part of it has 256 bytes, and no name has more than 255."),
        (Path("漢" * 86), "a part of it has 258 bytes, and no name has more than 255."),
    ],
)
def test_what_no_file_can_be_called_is_refused(given: object, why: str) -> None:
    for kind in (ConfigError, DataError):
        with pytest.raises(kind) as refusal:
            as_path("save", "path", given, kind)
        assert why in str(refusal.value)


@pytest.mark.parametrize("several", [False, True])
def test_a_file_takes_the_place_of_another_in_one_move(tmp_path: Path, several: bool) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with replacing(path, several=several) as partial:
        partial.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        assert partial.parent == tmp_path and partial.suffix == ".partial"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def write(file: object) -> None:
        raise failure

    with pytest.raises(type(failure)):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["a" * 255, "漢" * 85])
def test_the_longest_name_is_written_too(name: str, several: bool, tmp_path: Path) -> None:
    write_text(tmp_path / name, "whole", several=several)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"] and (tmp_path / name).exists()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that is shut to everybody")
def test_a_folder_that_takes_no_file_is_seen_by_making_one(tmp_path: Path) -> None:
    (tmp_path / "page").symlink_to("/proc/page")
    for path, shut in ((Path("/proc/page"), "/proc"), (tmp_path / "page", "/proc"), (Path("/proc"), "/proc")):
        with pytest.raises(ConfigError, match=f"^--out {path}: {shut} cannot be written. Name a f"):
            check_writable("--out", path)
    for path in (tmp_path, tmp_path / "new", Path(os.devnull)):
        check_writable("--out", path)
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_write_without_a_folder_names_the_path_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "none" / "page.html"
    with pytest.raises(FileNotFoundError) as error:
        write_text(path, "")
    assert error.value.filename == str(path)


def test_a_folder_is_replaced_only_where_there_is_none(tmp_path: Path) -> None:
    with replacing(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "inside").write_bytes(b"x")
    assert (tmp_path / "folder" / "inside").read_bytes() == b"x"


def test_writers_at_once_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with replacing(path, several=True) as one, replacing(path, several=True) as other:
        assert one != other
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert path.read_bytes() == b"one"


def _killed(path: Path) -> None:
    with replacing(path) as partial:
        partial.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_is_killed_leaves_the_file_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state"]
