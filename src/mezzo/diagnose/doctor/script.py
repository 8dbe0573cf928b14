"""Runs a Python script under the tracer."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError
from ...trace import Trace, TraceReport
from .children import followed_children


class _Enough(BaseException):
    """Ends the script: what was to be learned is learned. Not an Exception, so that the script does not catch it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRun:
    """What came of a script.

    Attributes:
        report: the diagnosis: of this process, or of the process it started that had the first fault or was seen best.
        error: the exception that ended the script by itself, None where it ran to its end or was stopped.
        stopped: why the tracer ended the script; empty if it did not.
        children: reports of the processes it started, by rank.
    """

    report: TraceReport
    error: BaseException | None
    stopped: str
    children: tuple[TraceReport, ...] = ()


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Give a script the command line and the import path it has when Python runs it."""
    argv, places = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places


def trace_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    *,
    steps: int | None = None,
    stop_at_fault: bool = True,
    is_module: bool = False,
) -> ScriptRun:
    """Run an unmodified script as `__main__` under the tracer.

    Args:
        path: the script.
        arguments: its command line.
        is_module: the path is the name of a module, as `python -m` takes it.
        steps: end it after this many optimizer steps; None: when it ends by itself.
        stop_at_fault: end it once a fault reached a loss, gradient, weight or output. What a loss scaler repairs by
            itself is no fault.

    Returns:
        The diagnosis, and how the script ended.

    Raises:
        DataError: no such file.

    Writes: what the script writes.
    """
    path = Path(path)
    if not is_module and not path.is_file():
        raise DataError(f"no script at {str(path)!r}; give the path of a Python file.")
    stopped = ""

    def on_reached(trace: Trace) -> None:
        if stop_at_fault and trace.is_running and trace.report.faults:
            trace.stop(_Enough("at the first fault"))

    def on_root(step: int) -> None:
        if steps is not None and step >= steps:
            trace.stop(_Enough(f"after {steps} steps"))

    trace = Trace(None, on_reached=on_reached, on_root=on_root)
    error: BaseException | None = None
    children: list[TraceReport] = []
    with _as_main(path, arguments):
        try:
            with followed_children(stop_at_fault=stop_at_fault) as children, trace:
                if is_module:
                    runpy.run_module(str(path), run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(str(path), run_name="__main__")
        except _Enough as enough:
            stopped = str(enough)
        except KeyboardInterrupt:
            stopped = "by the keyboard"
        except SystemExit as end:
            error = end if end.code not in (None, 0) else None
        except Exception as failure:
            error = failure
    return ScriptRun(
        report=_most_telling(trace.report, children), error=error, stopped=stopped, children=tuple(children)
    )


def _most_telling(own: TraceReport, children: Sequence[TraceReport]) -> TraceReport:
    """Return the report to show: the first fault of any process, else that of the one that did the training."""
    faulty = [r for r in (own, *children) if r.faults]
    if faulty:
        return min(faulty, key=lambda r: r.faults[0].step)
    best = max(children, key=lambda r: (r.record.backwards, r.record.ops), default=own)
    return best if best.record.backwards > own.record.backwards or not own.record.ops else own
