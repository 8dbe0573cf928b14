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


class _Enough(BaseException):
    """Ends the script: what was to be learned is learned. Not an Exception, so that the script does not catch it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRun:
    """What came of a script.

    Attributes:
        report: the diagnosis.
        error: the exception that ended the script by itself, None where it ran to its end or was stopped.
        stopped: why the tracer ended the script; empty if it did not.
    """

    report: TraceReport
    error: BaseException | None
    stopped: str


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
    path: str | Path, arguments: Sequence[str] = (), *, steps: int | None = None, stop_at_fault: bool = True
) -> ScriptRun:
    """Run an unmodified script as `__main__` under the tracer.

    Args:
        path: the script.
        arguments: its command line.
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
    if not path.is_file():
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
    with _as_main(path, arguments):
        try:
            with trace:
                runpy.run_path(str(path), run_name="__main__")
        except _Enough as enough:
            stopped = str(enough)
        except KeyboardInterrupt:
            stopped = "by the keyboard"
        except SystemExit as end:
            error = end if end.code not in (None, 0) else None
        except Exception as failure:
            error = failure
    return ScriptRun(report=trace.report, error=error, stopped=stopped)
