"""What a run measured: a JSON object a line in its file, the numbers of a tracker, and a picture."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointError
from ..extras import check_installed
from .checkpoint import write_whole, writing
from .progress import SmoothedLoss

Record = dict[str, Any]
Track = Callable[[int, Mapping[str, float]], object]
"""Takes the number of an update, and numbers by their names."""


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
    keys = _KEYS[found.get("kind") == "update"] if isinstance(found, dict) else set()
    is_whole = keys and keys <= found.keys() and isinstance(found["step"], int)
    return found if is_whole and all(isinstance(found[key], int | float | None) for key in keys - {"kind"}) else None


_KEYS = ({"kind", "step", "loss", "accuracy"}, {"kind", "step", "loss", "scale", "applied"})
"""What a record of an evaluation has at least, and one of an update."""


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}. Remove it, and the run goes on with a new one.")


class MetricsLog:
    """Appends records to a file; they reach it at every `flush`. Those after `step`, of a part of the run that is done again, are taken out.

    Raises:
        CheckpointError: the file cannot be written.

    Writes: the file.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [record for record in read_metrics(path) if record["step"] <= step] if step else []
        text = "".join(_line(record) for record in kept)
        write_whole(path, lambda file: file.write(text.encode()))
        self._pending: list[str] = []

    def add(self, **record: Any) -> None:
        """Note a record; "step" is required."""
        self._pending.append(_line(record))

    def flush(self) -> None:
        """Append what was noted. Raises: CheckpointError. Writes: the file."""
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.writelines(self._pending)
        self._pending.clear()


class NoLog:
    """Keeps no records: on ranks that do not write."""

    def add(self, **record: Any) -> None:
        """Forget a record."""

    def flush(self) -> None:
        """Do nothing."""


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


@contextmanager
def tracking(name: str, folder: Path) -> Iterator[Track]:
    """Hand numbers to TensorBoard or Weights & Biases inside the block, through their own libraries.

    Args:
        name: "tensorboard" writes event files into the folder; "wandb" makes a run where its own settings send it, in the
            folder with WANDB_MODE=offline; "none" forgets them.
        folder: of the run.

    Raises:
        ConfigError: the library is not installed.

    Writes: files of the tracker.
    """
    if name == "none":
        yield lambda step, numbers: None
        return
    check_installed(f"--tracker {name}", [name])
    if name == "wandb":
        import wandb

        with wandb.init(project="mezzo", name=folder.name, dir=str(folder)) as run:
            yield lambda step, numbers: run.log(dict(numbers), step=step)
        return
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        yield lambda step, numbers: [writer.add_scalar(name, value, step) for name, value in numbers.items()]


def smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average of values, without the bias of its start.

    >>> [round(value, 3) for value in smooth([1.0, 3.0])]
    [1.0, 2.026]
    """
    smoothed = SmoothedLoss()
    return [smoothed.add(value) for value in values]


def save_curves(metrics: Path, picture: Path) -> None:
    """Draw the curves of a metrics file as PNG; the loss scale's where there is one, or where steps were skipped. Writes: as `write_whole`."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    updates = [r for r in records if r["kind"] == "update" and r["applied"]]
    skipped = [r["step"] for r in records if r["kind"] == "update" and not r["applied"]]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    steps = [r["step"] for r in updates]
    scales = [(r["step"], r["scale"]) for r in records if r["kind"] == "update"]
    is_scaled = any(value != 1.0 for _, value in scales) or bool(skipped)
    figure = Figure(figsize=(7, 8 if is_scaled else 5.5), layout="constrained")
    loss, accuracy, *scale = figure.subplots(3 if is_scaled else 2, 1, sharex=True)
    loss.plot(steps, [r["loss"] for r in updates], color="0.8", linewidth=0.8, label="train, each update")
    loss.plot(steps, smooth([r["loss"] for r in updates]), label="train, smoothed")
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
