"""What a run measured: a JSON object a line in its file, the numbers of a tracker, a picture, and what a person sees on standard error."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from ..errors import CheckpointError, ConfigError, first_line
from ..files import BestEffort
from .checkpoint import write_whole, writing

SMOOTHING = 0.95


class Progress:
    """Told of every update and of everything worth a line; shows nothing, as on ranks that do not print."""

    def update(self, step: int, *, loss: float, lr: float, scale: float, skipped: int) -> None:
        """Show where the run is."""

    def note(self, text: str) -> None:
        """Print a line."""


class SmoothedLoss:
    """The mean of the losses so far, earlier ones counting less; without the bias of its start."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, loss: float) -> float:
        """Return the smoothed loss with another one; inf and NaN, whose updates are skipped, are left out."""
        if math.isfinite(loss):
            self._sum = SMOOTHING * self._sum + (1.0 - SMOOTHING) * loss
            self._weight = SMOOTHING * self._weight + (1.0 - SMOOTHING)
        return self._sum / self._weight if self._weight else math.nan


class Lines(Progress):
    """Progress where nobody watches: lines only, one about the loss every so many updates; 0 prints none."""

    def __init__(self, total: int, every: int) -> None:
        self._total, self._every, self._smoothed = total, every, SmoothedLoss()

    def update(self, step: int, *, loss: float, lr: float, scale: float, skipped: int) -> None:
        """Print a line, now and then. Writes: standard error."""
        smoothed = self._smoothed.add(loss)
        if self._every and (step == 1 or step % self._every == 0 or step == self._total):
            numbers = f"loss {loss:.4f}, smoothed {smoothed:.4f}, lr {lr:.3g}, scale {scale:g}"
            self.note(f"update {step}/{self._total}: {numbers}")

    def note(self, text: str) -> None:
        """Print a line. Writes: standard error."""
        print(text, file=BestEffort(sys.stderr), flush=True)


@contextmanager
def progress_bar(done: int, total: int, *, every: int = 0, is_shown: bool = True) -> Iterator[Progress]:
    """Show a bar with smoothed loss, scale, skipped updates and time left while inside, if standard error is a terminal.

    Elsewhere a line about the loss is printed every so many updates; 0 prints none. Writes: standard error.
    """
    if not is_shown:
        yield Progress()
        return
    if not sys.stderr.isatty():
        yield Lines(total, every)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(file=cast(TextIO, BestEffort(sys.stderr)))
    numbers = TextColumn("loss {task.fields[loss]}  scale {task.fields[scale]:g}  skipped {task.fields[skipped]}")
    columns = (BarColumn(), MofNCompleteColumn(), numbers, TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("training", total=total, completed=done, loss="-", scale=1.0, skipped=0)
        smoothed = SmoothedLoss()

        class Shown(Progress):
            def update(self, step: int, *, loss: float, lr: float, scale: float, skipped: int) -> None:
                bar.update(task, completed=step, loss=f"{smoothed.add(loss):.3f}", scale=scale, skipped=skipped)

            def note(self, text: str) -> None:
                console.print(text, highlight=False, markup=False)

        yield Shown()


Record = dict[str, Any]
Track = Callable[[int, Mapping[str, float]], object]
"""Takes the number of an update, and numbers by their names."""
_UPDATE_KEYS = {"kind", "step", "loss", "scale", "applied"}
_EVALUATION_KEYS = {"kind", "step", "loss", "accuracy"}
"""What records have at least."""


def read_metrics(path: Path) -> list[Record]:
    """Return the records of a metrics file, a last line that a kill cut short left out; a CheckpointError if it is damaged."""
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    records = [_record(line) for line in lines[:-1]]
    if None in records:
        raise _damaged(path, f"line {records.index(None) + 1} is no record of an update or an evaluation")
    return cast(list[Record], records)


def _record(line: bytes) -> Record | None:
    """Return the record in a line, None where it holds none."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    keys = _UPDATE_KEYS if found.get("kind") == "update" else _EVALUATION_KEYS
    is_whole = keys <= found.keys() and isinstance(found["step"], int)
    return found if is_whole and all(isinstance(found[key], int | float | None) for key in keys - {"kind"}) else None


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}. Remove it, and the run goes on with a new one.")


class MetricsLog:
    """Appends records to a file; they reach it at every `flush`. Those after `step`, of a part of the run that is done again, are taken out.

    Without a path, as on ranks that do not write, it keeps none. Raises: CheckpointError: the file cannot be written. Writes: the file.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        self._path, self._pending = path, list[str]()
        if path is not None:
            kept = [record for record in read_metrics(path) if record["step"] <= step] if step else []
            text = "".join(_line(record) for record in kept)
            write_whole(path, lambda file: file.write(text.encode()))

    def add(self, **record: Any) -> None:
        """Note a record; "step" is required."""
        if self._path is not None:
            self._pending.append(_line(record))

    def flush(self) -> None:
        """Append what was noted. Raises: CheckpointError. Writes: the file."""
        if self._path is not None:
            with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
                file.writelines(self._pending)
        self._pending.clear()


def _line(record: Record) -> str:
    """Return a record as a line of JSON, which has no inf and no NaN: they are null."""
    known = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
    return json.dumps(known, ensure_ascii=False) + "\n"


@contextmanager
def tracking(name: str, folder: Path) -> Iterator[Track]:
    """Hand numbers to TensorBoard or Weights & Biases inside the block, through their own libraries, which are installed.

    Args:
        name: "tensorboard" writes event files into the folder; "wandb" makes a run where its own settings send it, in the
            folder with WANDB_MODE=offline; "none" forgets them.
        folder: of the run.

    Raises: ConfigError: the library cannot begin. Writes: files of the tracker.
    """
    if name == "none":
        yield lambda step, numbers: None
        return
    if name == "wandb":
        import wandb

        try:
            started = wandb.init(project="mezzo", name=folder.name, dir=str(folder))
        except Exception as error:  # nobody logged in, no network: as many kinds as causes
            raise ConfigError(
                f"--tracker wandb cannot begin: {first_line(error)}. With WANDB_MODE=offline in the environment its numbers stay in the run's folder."
            ) from None
        with started as run:
            yield lambda step, numbers: run.log(dict(numbers), step=step)
        return
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        yield lambda step, numbers: [writer.add_scalar(name, value, step) for name, value in numbers.items()]


class Outputs(NamedTuple):
    """Where what a run measures goes: the file of its metrics, a tracker, and whoever watches."""

    log: MetricsLog
    track: Track
    progress: Progress


def save_curves(metrics: Path, picture: Path) -> None:
    """Draw the curves of a metrics file as PNG; the loss scale's where there is one, or where steps were skipped. Writes: as `write_whole`."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    updates = [r for r in records if r["kind"] == "update" and r["applied"]]
    skipped = [r["step"] for r in records if r["kind"] == "update" and not r["applied"]]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    steps, losses = [r["step"] for r in updates], [r["loss"] for r in updates]
    scales = [(r["step"], r["scale"]) for r in records if r["kind"] == "update"]
    is_scaled = any(value != 1.0 for _, value in scales) or bool(skipped)
    figure = Figure(figsize=(7, 8 if is_scaled else 5.5), layout="constrained")
    loss, accuracy, *scale = figure.subplots(3 if is_scaled else 2, 1, sharex=True)
    loss.plot(steps, losses, color="0.8", linewidth=0.8, label="train, each update")
    loss.plot(steps, list(map(SmoothedLoss().add, losses)), label="train, smoothed")
    loss.plot([r["step"] for r in evaluations], [r["loss"] for r in evaluations], "o-", label="dev")
    loss.set(ylabel="loss", ylim=(0.0, 1.05 * loss.get_ylim()[1]))  # losses that stay put lie on the edge else
    loss.legend()
    accuracy.plot([r["step"] for r in evaluations], [r["accuracy"] for r in evaluations], "o-", color="C1")
    accuracy.set(ylabel="dev accuracy", xlabel="" if scale else "update")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    for below in scale:
        below.step(*zip(*scales, strict=True), where="post", color="C2", label="loss scale")
        below.set_yscale("log", base=2)
        for step in skipped:
            below.axvline(step, color="C3", linewidth=0.8)
        below.set(ylabel=f"loss scale ({len(skipped)} skipped)", xlabel="update")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_whole(picture, lambda file: file.write(content.getvalue()))
