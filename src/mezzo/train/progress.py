"""What a person sees of a running training: a bar on a terminal, a line an evaluation elsewhere; on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Told of every update and of everything worth a line."""

    def update(self, step: int, *, loss: float, scale: float, skipped: int) -> None:
        """Show where the run is."""

    def note(self, text: str) -> None:
        """Print a line."""


class Lines:
    """Progress where nobody watches: lines only."""

    def update(self, step: int, *, loss: float, scale: float, skipped: int) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Print a line. Writes: standard error."""
        print(text, file=sys.stderr, flush=True)


class Silent:
    """Progress on ranks that do not print."""

    def update(self, step: int, *, loss: float, scale: float, skipped: int) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Print nothing."""


@contextmanager
def progress_bar(done: int, total: int, *, is_shown: bool = True) -> Iterator[Progress]:
    """Show a bar with loss, scale, skipped updates and time left while inside, if standard error is a terminal.

    Args:
        done: updates already done.
        total: updates of the whole run.
        is_shown: False shows nothing.

    Writes: standard error.
    """
    if not is_shown:
        yield Silent()
        return
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    numbers = TextColumn("loss {task.fields[loss]:.3f}  scale {task.fields[scale]:g}  skipped {task.fields[skipped]}")
    columns = (BarColumn(), MofNCompleteColumn(), numbers, TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("training", total=total, completed=done, loss=float("nan"), scale=1.0, skipped=0)

        class Shown:
            def update(self, step: int, *, loss: float, scale: float, skipped: int) -> None:
                bar.update(task, completed=step, loss=loss, scale=scale, skipped=skipped)

            def note(self, text: str) -> None:
                console.print(text, highlight=False, markup=False)

        yield Shown()
