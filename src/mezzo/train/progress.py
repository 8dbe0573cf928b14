"""What a person sees of a running training: a bar on a terminal, a line an evaluation elsewhere; on standard error."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from ..files import BestEffort

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
