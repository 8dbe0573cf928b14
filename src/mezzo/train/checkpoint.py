"""Files that are whole or not there: a run's checkpoint and its best model survive a kill and a full disk."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, MezzoError, first_line, interrupt_in, is_out_of_memory, listed
from ..files import flush_to_disk, write_atomically
from .config import TrainConfig
from .model import quiet

_KEYS = {"launch", "config", "labels", "fingerprint", "tokenizer", "position", "step", "schedule", "average"}
_SHUT = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError, FileNotFoundError)
FORMAT = 2
"""Rises when older checkpoints can no longer be read."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write, of a full disk or a folder that is shut, into a CheckpointError that says what is still whole."""
    handled = sys.exc_info()[1]
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk, and Ctrl-C, in a RuntimeError
        if interrupt := interrupt_in(error, handled):
            raise interrupt from None
        if is_out_of_memory(error):
            raise
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else first_line(error)
        kept = "; the one before it is kept" if path.exists() and not isinstance(cause, NotADirectoryError) else ""
        advice = "Make room or choose another --out, then go on with --resume."
        if isinstance(cause, _SHUT):
            advice = "Name a folder that can be written with --out."
        raise CheckpointError(f"cannot write {path}: {reason}{kept}. {advice}") from error


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file as `write_atomically` does. Raises: CheckpointError: it could not be written; the file is what it was."""
    with writing(path):
        write_atomically(path, write)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, whole or not at all. Writes: the file. Raises: CheckpointError."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Save the state of a run as `write_whole` does: tensors and plain values, so that `torch.load(weights_only=True)` reads it. Syncs: yes."""
    write_whole(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return what `save_checkpoint` saved, on the CPU; a CheckpointError if there is none, it cannot be read, or another version wrote it."""
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path} to go on from. Leave --resume out to start, or name the run's folder with --out.")  # fmt: skip
    try:
        _check_sums(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        written = state["format"]
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Have its owner let you read it.") from None
    except Exception as error:  # torch.load raises many kinds
        if is_out_of_memory(error):
            raise  # of a whole checkpoint, which is to be kept
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read: {first_line(error)}. Bring back a whole one, or start again with --overwrite."
        ) from None
    if written != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {written}; this version of mezzo reads format {FORMAT}.")
    return dict(state)


def _check_sums(path: Path) -> None:
    """Refuse a file whose bits changed on the disk, which torch loads as they are. Raises: OSError, BadZipFile."""
    with ZipFile(path) as file:
        if torch.serialization.get_crc32_options() and (part := file.testzip()):
            raise OSError(f"its part {part} has changed since it was written")


def check_whole(path: Path, state: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks a part of a run. Raises: CheckpointError."""
    missing = sorted(_KEYS - state.keys())
    if missing:
        raise CheckpointError(f"{path} is damaged: it lacks {listed(missing)}. Start again with --overwrite.")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a damaged checkpoint raises inside the block into one sentence. Raises: CheckpointError."""
    try:
        yield
    except MezzoError:
        raise
    except Exception as error:  # as many kinds as there are ways to be damaged
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {first_line(error)}. Bring back a whole one, or start again with --overwrite."
        ) from error


def check_same_run(state: dict[str, Any], config: TrainConfig, labels: tuple[str, ...], fingerprint: str) -> None:
    """Refuse, by a CheckpointError, to go on with a run of other labels, other data or other options than the checkpoint's."""
    theirs = tuple(state["labels"])
    if theirs != labels:
        raise CheckpointError(
            f"the checkpoint was trained for the labels {', '.join(theirs)}, and the data has {', '.join(labels)}. "
            f"Start a run in another --out; --model {config.out / 'best'} takes over its encoder."
        )
    if not isinstance(state["config"], dict):
        raise CheckpointError(
            "the checkpoint holds no configuration of a run. Take an older one, or start in another --out."
        )
    changed = TrainConfig.from_dict(state["config"]).differences(config)
    if changed:
        words = ", ".join(f"{name}={now} (was {was})" for name, (was, now) in changed.items())
        raise CheckpointError(
            f"--resume goes on with the same run, and these options are not the same: {words}. "
            f"Leave them as they were, or start a run in another --out; --model {config.out / 'best'} takes over its weights."
        )
    if state["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"the rows of {config.data} have changed since the checkpoint was written, so the run cannot go on as it was. Bring the old data back, or start a run in another --out."
        )


def save_model(folder: Path, model: nn.Module, tokenizer: Any, weights: dict[str, Tensor] | None = None) -> None:
    """Save a transformers model and its tokenizer, for `predict` and `from_pretrained`, each file whole or not at all.

    Files that are there already keep their content until the new ones are on the disk; the weights are one file and
    move last, so a kill leaves the old model or the new one. `weights` are saved in place of the model's own: the masters of
    16-bit weights.

    Raises: CheckpointError: it could not be written; the model that was there still is. Writes: the folder. Syncs: yes.
    """
    from safetensors import SafetensorError

    aside = folder.with_name(f"{folder.name}.partial")
    with writing(folder):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            with quiet():
                model.save_pretrained(aside, state_dict=weights, max_shard_size="1000TB")  # type: ignore[operator]  # transformers' own
                tokenizer.save_pretrained(aside)
            for file in aside.iterdir():
                shutil.copymode(aside / "config.json", file)  # safetensors keeps what it writes to the owner
                flush_to_disk(file)
            folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(aside.iterdir(), key=lambda file: file.suffix == ".safetensors"):
                os.replace(file, folder / file.name)
            flush_to_disk(folder)
        except SafetensorError as error:  # its full disk is no OSError
            raise OSError(str(error)) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
