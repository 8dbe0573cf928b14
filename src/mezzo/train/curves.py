"""The picture of a run: loss, accuracy and loss scale over its updates."""

from __future__ import annotations

import io
from pathlib import Path

from .checkpoint import write_whole
from .metrics import read_metrics
from .progress import SmoothedLoss


def smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average of values, without the bias of its start.

    >>> [round(value, 3) for value in smooth([1.0, 3.0])]
    [1.0, 2.026]
    """
    smoothed = SmoothedLoss()
    return [smoothed.add(value) for value in values]


def save_curves(metrics: Path, picture: Path) -> None:
    """Draw the curves of a metrics file as PNG.

    Args:
        metrics: the records.
        picture: the file to write.

    Raises:
        CheckpointError: the picture cannot be written.

    Writes: the picture.
    """
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    updates = [r for r in records if r["kind"] == "update" and r["applied"]]
    skipped = [r["step"] for r in records if r["kind"] == "update" and not r["applied"]]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    steps = [r["step"] for r in updates]
    figure = Figure(figsize=(7, 8), layout="constrained")
    loss, accuracy, scale = figure.subplots(3, 1, sharex=True)
    loss.plot(steps, [r["loss"] for r in updates], color="0.8", linewidth=0.8, label="train, each update")
    loss.plot(steps, smooth([r["loss"] for r in updates]), label="train, smoothed")
    loss.plot([r["step"] for r in evaluations], [r["loss"] for r in evaluations], "o-", label="dev")
    loss.set(ylabel="loss", ylim=(0.0, None))
    loss.legend()
    accuracy.plot([r["step"] for r in evaluations], [r["accuracy"] for r in evaluations], "o-", color="C1")
    accuracy.set(ylabel="dev accuracy")
    scale.step([r["step"] for r in records if r["kind"] == "update"],
               [r["scale"] for r in records if r["kind"] == "update"], where="post", color="C2", label="loss scale")  # fmt: skip
    scale.set_yscale("log", base=2)
    for step in skipped:
        scale.axvline(step, color="C3", linewidth=0.8)
    scale.set(ylabel=f"loss scale ({len(skipped)} skipped)", xlabel="update")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_whole(picture, lambda file: file.write(content.getvalue()))
