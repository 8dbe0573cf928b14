from __future__ import annotations

import errno
import json
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file
from tests.train.small import tiny
from tests.train.test_tokens import texts
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.errors import CheckpointError, DataError
from mezzo.train import checkpoint as saving
from mezzo.train import run
from mezzo.train.model import build_model, train_tokenizer

STATE = {"weights": torch.arange(1 << 16, dtype=torch.float32), "best": -1.0, "labels": ["a", "b"], "none": None}


@contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond some bytes, as a disk without room does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    saving.save_checkpoint(path, STATE)
    read = torch.load(path, weights_only=True)
    assert read["format"] == saving.FORMAT
    loaded = saving.load_checkpoint(path)
    assert torch.equal(loaded["weights"], STATE["weights"])
    assert {k: v for k, v in loaded.items() if k not in ("weights", "format")} == {
        k: v for k, v in STATE.items() if k != "weights"
    }
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    saving.save_checkpoint(path, STATE)
    before = path.read_bytes()
    with full_disk(len(before) // 2), pytest.raises(CheckpointError) as refusal:
        saving.save_checkpoint(path, {**STATE, "best": 1.0})
    assert str(refusal.value) == (
        f"cannot write {path}: File too large; the one before it is kept. "
        "Make room or choose another --out, then go on with --resume."
    )
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_kill_in_the_middle_of_a_write_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    saving.save_checkpoint(path, STATE)
    before = path.read_bytes()

    def half(file: BinaryIO) -> None:
        file.write(b"half"), file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        try:
            saving.write_whole(path, half)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert path.read_bytes() == before
    assert (tmp_path / "checkpoint.pt.partial").read_bytes() == b"half"
    saving.save_checkpoint(path, {**STATE, "best": 1.0})  # what the killed one left behind is in nobody's way
    assert saving.load_checkpoint(path)["best"] == 1.0
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_the_content_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a power cut cannot break: write, fsync the file, move, fsync the folder."""
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(("replace", str(b))), replace(a, b)))
    path = tmp_path / "x"
    saving.write_whole(path, lambda file: file.write(b"content"))
    assert calls == [("fsync", f"{path}.partial"), ("replace", str(path)), ("fsync", str(tmp_path))]


def test_an_error_of_the_writer_itself_is_not_disguised(tmp_path: Path) -> None:
    def broken(file: BinaryIO) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        saving.write_whole(tmp_path / "x", broken)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no checkpoint"),
        (b"", "is not a checkpoint that can be read"),
        (b"PK\x03\x04 cut off", "is not a checkpoint that can be read"),
    ],
)
def test_what_is_no_checkpoint_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        saving.load_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"hi\n", bytes(4096), b"PK\x03\x04 cut off"])
def test_what_is_no_checkpoint_is_told_what_to_do(content: bytes, tmp_path: Path) -> None:
    """torch answers these with `105`, nothing, and the advice to load without `weights_only`."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        saving.load_checkpoint(path)
    assert str(refusal.value) == (
        f"{path} is not a checkpoint that can be read: File is not a zip file. "
        "Bring back a whole one, or start again with --overwrite."
    )


def test_a_checkpoint_of_somebody_else_is_not_to_be_written_over() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        saving.save_checkpoint(path, STATE)
        path.chmod(0)
        path.parent.chmod(0o755)
        is_root = os.geteuid() == 0
        if is_root:  # who may read everything
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError) as refused:
                saving.load_checkpoint(path)
        finally:
            if is_root:
                os.seteuid(0)
    assert str(refused.value) == f"{path} cannot be read: Permission denied. Have its owner let you read it."


def test_a_checkpoint_whose_bits_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    saving.save_checkpoint(path, STATE)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its part .* has changed since it was written\. Bring back a whole one"):
        saving.load_checkpoint(path)


def test_a_checkpoint_that_was_saved_without_sums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        saving.save_checkpoint(tmp_path / "x", STATE)
        assert torch.equal(saving.load_checkpoint(tmp_path / "x")["weights"], STATE["weights"])
    finally:
        torch.serialization.set_crc32_options(True)


class NoMemory(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise torch.OutOfMemoryError("planted")


def test_memory_that_runs_out_is_not_told_as_a_checkpoint_to_be_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    saving.save_checkpoint(path, STATE)
    with NoMemory(), pytest.raises(torch.OutOfMemoryError, match="planted"):
        saving.load_checkpoint(path)
    with NoMemory(), pytest.raises(torch.OutOfMemoryError, match="planted"), saving.reading(path):
        torch.zeros(1)
    with NoMemory(), pytest.raises(torch.OutOfMemoryError, match="planted"):
        saving.write_whole(path, lambda file: torch.zeros(1))
    assert saving.load_checkpoint(path)["labels"] == ["a", "b"]


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"format": 99}, path)
    with pytest.raises(CheckpointError, match="has checkpoint format 99; this version of mezzo reads format 2"):
        saving.load_checkpoint(path)


def test_a_checkpoint_that_runs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"format": saving.FORMAT, "evil": Path("x")}, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="is not a checkpoint that can be read"):
        saving.load_checkpoint(tmp_path / "checkpoint.pt")


def same_run(**changes: Any) -> None:
    config = tiny(Path("a.tsv"), Path("out"))
    state = {"config": config.to_dict(), "labels": ["a", "b"], "fingerprint": "f"}
    asked = {"config": config, "labels": ("a", "b"), "fingerprint": "f", **changes}
    saving.check_same_run(state, **asked)


def test_only_the_same_run_is_resumed() -> None:
    config = tiny(Path("a.tsv"), Path("out"))
    same_run()
    same_run(config=config.replace(out=Path("moved"), policy="fp16", resume=True))
    with pytest.raises(CheckpointError, match="was trained for the labels a, b, and the data has a, c"):
        same_run(labels=("a", "c"))
    with pytest.raises(CheckpointError, match=r"these options are not the same: batch_size=8 \(was 16\)"):
        same_run(config=config.replace(batch_size=8))
    with pytest.raises(CheckpointError, match=r"the rows of a\.tsv have changed"):
        same_run(fingerprint="g")


def test_a_saved_model_is_old_or_new_and_never_half(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(texts(), 300, 24)
    old, new = (build_model(tiny(Path("x.tsv"), tmp_path), ("a", "b"), tokenizer) for _ in range(2))
    saving.save_model(tmp_path / "best", old, tokenizer)
    weights = tmp_path / "best" / "model.safetensors"
    before = weights.read_bytes()
    with full_disk(len(before) // 2), pytest.raises(CheckpointError, match="the one before it is kept"):
        saving.save_model(tmp_path / "best", new, tokenizer)
    assert weights.read_bytes() == before
    assert os.listdir(tmp_path) == ["best"]
    saving.save_model(tmp_path / "best", new, tokenizer)
    wanted = new.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in load_file(weights).items())
    assert json.loads((tmp_path / "best" / "config.json").read_text())["model_type"] == "bert"


def test_whoever_reads_the_other_files_of_a_model_reads_its_weights(tmp_path: Path) -> None:
    """safetensors 0.8 keeps what it writes to the owner."""
    tokenizer = train_tokenizer(texts(), 300, 16)
    model = build_model(tiny(Path("x.tsv"), tmp_path), ("a", "b"), tokenizer)
    saving.save_model(tmp_path / "best", model, tokenizer)
    assert len({file.stat().st_mode for file in (tmp_path / "best").iterdir()}) == 1


@pytest.mark.parametrize("out", ["taken", "taken/run"])
def test_a_file_in_place_of_the_folder_is_no_full_disk(out: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(
        CheckpointError, match=r"^cannot write .*: Not a directory\. Name a folder that can be written with --out\.$"
    ):
        run(tiny(tmp_path / "not-read.tsv", tmp_path / out))


def test_a_folder_that_cannot_be_made_is_no_full_disk() -> None:
    with (
        pytest.raises(
            CheckpointError, match=r"No such file or directory\. Name a folder that can be written with --out\.$"
        ),
        saving.writing(Path("/proc/run")),
    ):
        Path("/proc/run").mkdir()


def test_a_folder_that_may_not_be_written_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Permission denied\. Name a folder that can be written with --out\.$"):
        with saving.writing(tmp_path / "config.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_goes_on_and_a_full_disk_after_it_is_told(
    kind: type[BaseException], tmp_path: Path
) -> None:
    with pytest.raises(kind), saving.writing(tmp_path / "a"):
        try:
            raise kind
        except kind:
            raise RuntimeError("unexpected pos 3") from None  # as torch.save has it
    try:
        raise kind
    except kind:
        with pytest.raises(CheckpointError, match="No space left"), saving.writing(tmp_path / "a"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None


def test_a_folder_that_nobody_can_make_is_told_before_the_data_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^cannot write /proc/runs/one: .* Name a folder that can be written"):
        run(tiny(tmp_path / "not-read.tsv", Path("/proc/runs/one")))
    with pytest.raises(DataError, match="not-read"):
        run(tiny(tmp_path / "not-read.tsv", tmp_path / "some" / "run"))
    assert not (tmp_path / "some").exists()
