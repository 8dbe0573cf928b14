"""`record`: keeps what the last steps of a run were made of, in a bounded folder of data."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import random_state
from ..errors import ConfigError, DataError, kind_of, shown
from ..files import FileImage, as_path, flush_to_disk
from ..formats import is_count, number_of
from ..step import Stepper, StepResult
from . import step_data
from .second_run import SecondRun
from .trial import LossFn, check_trial, cover

START, FORMAT = "start.pt", 4
BATCH, STEP, RESULTS, PARTIAL = ".batch", ".step", ".results", ".partial"
_SEGMENTS = 2
_PLAIN = (bool, int, float, str, bytes, type(None))
_WAITING = 16
"""Results that may wait to be read; by then the device has long sent them."""


def as_data(value: object, what: str, *, copies: bool = False) -> Any:
    """Return nested data as dicts, lists, tuples, tensors, numbers and text alone; `copies` of tensors on the host, else themselves.

    Raises: DataError: something else, which could only be kept as code. Syncs: yes, for copies of tensors on a device.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True) if copies else value.detach()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {k if isinstance(k, _PLAIN) else str(k): as_data(v, what, copies=copies) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(as_data(v, what, copies=copies) for v in value)
    raise DataError(
        f"{what} holds {type(value).__name__}, and a record keeps data only: tensors, numbers, text, and dicts, lists and tuples of "
        "them. Note the tensors that the loss is made of."
    )


def _number_of(option: object) -> Any:
    """Return an option of a group that a schedule may move: a number, one in a tensor, or a tuple of them; None for others. Syncs: for a tensor."""
    if isinstance(option, tuple):
        numbers = tuple(map(_number_of, option))
        return None if None in numbers else numbers
    option = number_of(option) if isinstance(option, Tensor) and option.numel() == 1 else option
    return option if isinstance(option, (bool, int, float)) else None


def batch_file(folder: Path, step: int, index: int) -> Path:
    """Return the file of one batch of a step inside its segment, with the random state it met and the step's settings by then."""
    return folder / f"{step:08d}.{index}{BATCH}"


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a step's settings, where they are others than those beside its last batch."""
    return folder / f"{step:08d}{STEP}"


def _save(value: Any, path: Path) -> None:
    """Write a file that a kill leaves whole or not at all; over one that `_make_ready` left, whose pages are in memory."""
    made = f"{path}{PARTIAL}"
    # Buffered: a raw file may write less than it was given, without a word.
    with open(os.open(made, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        step_data.write(value, file)
        if os.fstat(file.fileno()).st_size > file.tell():
            file.truncate()
    os.replace(made, path)


def _make_ready(old: Path, new: Path) -> None:
    """Rename the files of an old segment to those of a new one, to be written over: that takes a tenth of the time of new files."""
    (old / START).replace(old / (START + PARTIAL))
    for file in [f for f in old.iterdir() if f.name[0].isdigit()]:
        number, _, kind = file.name.partition(".")
        file.replace(old / f"{int(number) - int(old.name) + int(new.name):08d}.{kind.removesuffix(PARTIAL)}{PARTIAL}")
    old.replace(new)


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Return the segments of a record that are whole: the step each begins with, and its folder. Raises: DataError: it cannot be read."""
    try:
        found = [(int(p.name), p) for p in folder.iterdir() if p.name.isdecimal() and (p / START).is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        why = f"{str(folder)!r} cannot be read as a record: {error.strerror}"
        raise DataError(f"{why}. Have its owner let you read it, or name another folder.") from None
    return sorted(found)


class Recorder(AbstractContextManager["Recorder"]):
    """Records the steps of a run; made by `mezzo.record`. `step` is the number of the next, from 0.

    Writes: `step` and `backward` of the stepper, until `close`; files in the folder.
    """

    def __init__(self, amp: Stepper, folder: Path, every: int, twice_every: int, loss_fn: LossFn | None) -> None:
        self.folder, self.step = folder, 0
        self._amp, self._every, self._twice_every = amp, every, twice_every
        self._second = SecondRun(amp, amp.backward, loss_fn) if twice_every and loss_fn else None
        self._num_batches = 0
        self._noted: dict[str, Any] = {}  # the settings beside the last batch
        self._last_options: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        self._results: list[tuple[int, StepResult, list[Tensor]]] = []
        self._segment = folder
        self._writer = ThreadPoolExecutor(1, "mezzo record flushes")
        self._image = FileImage()
        self._snapshot_write: Future[None] | None = None
        self._has_failed = False
        self._leave = cover(amp, step=self._recorded_step, backward=self._recorded_backward)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Hand out the batches of a loader, each noted before. Syncs: for batches on a device."""
        for batch in loader:
            self.note(batch)
            yield batch

    def note(self, batch: Any) -> None:
        """Write a batch of the step in the making, and the random state it meets.

        Raises:
            DataError: it holds something else than tensors, numbers, text, and mappings and sequences of them; or it, or the last
            snapshot, cannot be written.

        Syncs: for batches on a device.
        """
        if not self._num_batches and self.step % self._every == 0:
            self._begin_segment()
        if self._snapshot_write is not None and self._snapshot_write.done():
            self._wait_for_snapshot()
        data, random = as_data(batch, "a batch", copies=self._repeat is not None), random_state.get()
        self._noted = self._settings(self._last_options)
        with self._naming_failures():
            path = batch_file(self._segment, self.step, self._num_batches)
            _save({"data": data, "random": tuple(random), **self._noted}, path)
        self._num_batches += 1
        if self._repeat is not None:
            self._repeat.note(data, random)

    @property
    def _repeat(self) -> SecondRun | None:
        """What runs the step in the making twice; None where it is run once."""
        return self._second if self._second is not None and self.step % self._twice_every == 0 else None

    def _begin_segment(self) -> None:
        self._read_results()
        self._wait_for_snapshot()
        self._segment = self.folder / f"{self.step:08d}"
        held = segments(self.folder)
        if len(held) < _SEGMENTS:
            self._segment.mkdir(parents=True, exist_ok=True)
        else:
            _make_ready(held[0][1], self._segment)
        state = {"format": FORMAT, "step": self.step, "policy": str(self._amp.policy), "run": self._amp.state_dict()}
        with self._naming_failures():
            self._image.clear()
            # torch's older format: it has no sums over the bytes, which take longer than copying them and which torch never reads
            torch.save(state, self._image, _use_new_zipfile_serialization=False)  # type: ignore[arg-type]  # no IO, but writes as one
        self._snapshot_write = self._writer.submit(self._write_snapshot, self._image, self._segment)
        if not held:
            self._wait_for_snapshot()

    @staticmethod
    def _write_snapshot(image: FileImage, segment: Path) -> None:
        """Bring a snapshot to the disk beside training; until it has its name, steps are replayed from the snapshot before."""
        made = segment / (START + PARTIAL)
        image.write(step_data.seal(zlib.crc32(image.contents())))
        image.save(made)
        os.replace(made, segment / START)
        flush_to_disk(segment)

    def _wait_for_snapshot(self) -> None:
        pending, self._snapshot_write = self._snapshot_write, None
        if pending is not None:
            with self._naming_failures():
                pending.result()

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as failure:  # of the file, and of torch's writer
            self._has_failed = True
            raise DataError(
                f"record was asked to keep step {self.step} in {str(self.folder)!r}, which could not be written: {failure}. The step was "
                "not taken. Close the recorder to go on without it, or make room and record into a new folder."
            ) from failure

    def _recorded_backward(self, backward: Callable[..., None], loss: Tensor, **options: Any) -> None:
        backward(loss, **options)
        self._losses.append(loss.detach())
        if (second := self._repeat) is not None:
            second.after_backward()

    def _recorded_step(
        self, step: Callable[..., StepResult], closure: Callable[[], Any] | None = None, **options: Any
    ) -> StepResult:
        if closure is not None or options.get("optimizer") is not None:
            raise ConfigError(
                "record was asked to keep a step with a closure, or of one optimizer of several, which it cannot run again. Write "
                "amp.step() for all of them, or close the recorder before."
            )
        if is_kept := self._num_batches > 0:
            self._write_step(options)
        if self._repeat is not None:
            self._repeat.compare(self.step, self._losses)
        losses, self._losses, self._num_batches = self._losses, [], 0
        result = step(**options)
        if is_kept:
            self._results.append((self.step, result, losses))
        self.step += 1
        if len(self._results) >= _WAITING:
            self._read_results()
        return result

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return what a step depends on beside its batches: its options, and the numbers of each parameter group."""
        groups = [group for optimizer in self._amp.optimizers for group in optimizer.param_groups]
        kept = [{k: x for k, v in group.items() if (x := _number_of(v)) is not None} for group in groups]
        return {"options": options, "groups": kept}

    def _write_step(self, options: dict[str, Any]) -> None:
        """Write the step's settings, before it is taken, if they changed since its last batch."""
        self._last_options = as_data(options, "step", copies=True)
        settings = self._settings(self._last_options)
        if settings != self._noted:
            with self._naming_failures():
                _save(settings, step_file(self._segment, self.step))

    def _read_results(self) -> None:
        """Write what came of the steps, beside them. Syncs: with the last of them."""
        found = {n: outcome(losses, r.grad_norm, r.scale, applied=r.applied) for n, r, losses in self._results}
        if found:
            with self._naming_failures():
                _save(found, step_file(self._segment, next(iter(found))).with_suffix(RESULTS))
        self._results.clear()

    def close(self) -> None:
        """Stop recording; what was recorded stays.

        Raises:
            DataError: the last results could not be written.

        Writes: `step` and `backward` of the stepper, as they were.
        """
        self._leave()
        try:
            if not self._has_failed:
                self._read_results()
                self._wait_for_snapshot()
        finally:
            self._writer.shutdown()
            self._image = FileImage()  # gives the memory back
            for left in self._segment.glob(f"*{PARTIAL}"):
                left.unlink()
            with suppress(OSError):  # it holds a step
                (self.folder / f"{0:08d}").rmdir()

    def __exit__(self, *error: object) -> None:
        self.close()


def outcome(losses: list[Tensor], grad_norm: float, scale: float, *, applied: bool) -> dict[str, Any]:
    """Return what a step came to, as data. Syncs: for losses on a device."""
    norm = torch.tensor(grad_norm, dtype=torch.float32)
    return {"losses": [loss.float().cpu() for loss in losses], "grad_norm": norm, "scale": scale, "applied": applied}


def record(
    amp: Stepper, folder: str | Path, *, every: int = 100, twice_every: int = 0, loss_fn: LossFn | None = None
) -> Recorder:
    """Keep what the last steps of a run were made of, so that any of them can be run again by `mezzo.replay`.

    A segment begins with everything `amp.state_dict()` holds; each of its steps adds its batches, the random state each
    met, learning rates, and then losses, gradient norm and loss scale. Two segments are kept: at least the last `every`
    steps, in the space of two checkpoints and 2 `every` batches. A snapshot is copied in host memory, as large as a checkpoint and
    kept, from where a thread writes it. A record is data, loaded with `weights_only`.

    Args:
        amp: what `mezzo.prepare` returned.
        folder: made where it is missing.
        every: steps in a segment. Fewer make a replay start nearer, and write more.
        twice_every: run forward and backward of every step whose number this divides a second time, and compare losses, gradients
            and buffers bit for bit: silent corruption is noticed in its step, before weights are touched. 0: no step.
        loss_fn: for that: loss_fn(model, batch) computes what is given to `amp.backward` for a batch, as for `mezzo.replay`.

    Returns:
        The recorder, to be closed or used as a context.

    Raises:
        ConfigError: `every` below 1, something else to record, or `twice_every` without `loss_fn`.
        DataError: the folder holds another record, or cannot be written.
        StepError: the stepper was released.

    Writes: the folder; `step` and `backward` of the stepper, until it is closed.
    Syncs: once in 16 steps, with the last of them, with each step that is run twice, and for a learning rate in a tensor.
    """
    if not is_count(twice_every) or (twice_every != 0) != (loss_fn is not None):
        raise ConfigError(
            f"record was given twice_every={shown(twice_every)} {'without' if loss_fn is None else 'and a'} loss_fn; to run steps twice it takes both: "
            "how many steps lie between them, and loss_fn(model, batch), which computes what is given to amp.backward."
        )
    if not isinstance(amp, Stepper) or not is_count(every, 1):
        raise ConfigError(
            f"record was asked to keep {kind_of(amp)} with every={shown(every)}; give what mezzo.prepare returned, and a whole number of at least 1."
        )
    _ = amp.policy  # which a stepper that was released refuses
    check_trial("record", None, loss_fn)
    path = as_path("record", "folder", folder)
    taken = f"{str(path)!r} holds another record already; give a new folder, each rank its own, or remove that one."
    if segments(path):
        raise DataError(taken)
    try:
        (path / f"{0:08d}").mkdir(parents=True)  # which one recorder alone can make
    except FileExistsError as error:
        raise DataError(taken) from error
    except OSError as error:
        raise DataError(f"cannot make the folder {str(path)!r}: {error.strerror}. Give record another.") from error
    return Recorder(amp, path, every, twice_every, loss_fn)
