"""What `mezzo doctor` runs: a script, and the processes it starts, under the tracer; or a model under every tool."""

from __future__ import annotations

import atexit
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from ..errors import ConfigError, DataError, as_flag, check_given, first_line, kind_of, plural, shown
from ..files import as_path
from ..formats import is_count
from ..policy import Policy, PolicyLike, as_policy
from ..report import Block, Document, Heading, Note, Report
from ..trace import Trace, TraceReport, is_called_from
from .comparison import compare
from .explain import explain
from .lint import lint
from .named_code import check_text, named_function
from .trial import LossFn, device_of


class _ScriptStop(BaseException):
    """Ends the script: what was to be learned is learned. Not an Exception, so that the script does not catch it."""


class _TaskStop(_ScriptStop, Exception):
    """Ends a task of a `Pool`, whose workers hand nothing but Exceptions on: for what another ended, the script would wait for ever."""


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


def _run_as_main(name: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a script, or a module, with the command line and the import path that Python gives it."""
    argv, places = sys.argv, list(sys.path)
    sys.argv = [str(Path(name)), *arguments]
    sys.path.insert(0, str(Path(name).resolve().parent))
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
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

    Raises:
        DataError: no such file, or nothing in it, or in the module, that can be run.

    Writes: what the script writes.
    """
    is_module = as_flag("trace_script", "is_module", is_module)
    name = path if is_module and isinstance(path, str) else str(as_path("trace_script", "path", path))
    check_given("trace_script", "arguments", arguments, list | tuple, "a list of words")
    if not (steps is None or is_count(steps, 1)):
        raise ConfigError(f"trace_script was given steps={shown(steps)}; give a whole number of at least 1, or None.")
    if not is_module and not Path(name).is_file():
        raise DataError(f"no script at {name!r}; give the path of a Python file.")

    def on_root(step: int) -> None:
        if steps is not None and step >= steps:
            _stop(trace, f"after {steps} {plural('step', steps)}")

    trace = Trace(None, on_reached=_on_reached, on_root=on_root)
    children: list[TraceReport] = []

    def traced() -> None:
        with trace:
            _run_as_main(name, arguments, is_module=is_module)

    with _followed_processes(trace, children, stop_at_fault=stop_at_fault):
        error, stopped = _end_of(traced)
        if not _is_script():  # a fork that came to the end of the script
            if error is not None:
                traceback.print_exception(error)
            sys.stdout.flush()
            os._exit(int(error is not None))
    raised = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if error else []
    raised_in = str(raised[-1].f_globals.get("__name__")) if raised else ""
    if isinstance(error, ImportError) and raised_in == "runpy":
        raise DataError(
            f"the {'module' if is_module else 'script'} {name!r} cannot be run: {first_line(error)}. "
            "Give the name of a module, as python -m takes it, or the path of a script without -m."
        )
    if raised_in in ("runpy", "pkgutil") and not is_module:
        check_text(Path(name))
    report = _most_telling(trace.report, children)
    return ScriptRun(report=report, error=error, stopped=stopped, children=tuple(children))


def _end_of(run: Callable[[], None]) -> tuple[BaseException | None, str]:
    """Run a script, and return the error that ended it by itself, and why somebody else did."""
    try:
        run()
    except _ScriptStop as stop:
        return None, str(stop)
    except KeyboardInterrupt:
        return None, "by the keyboard"
    except SystemExit as end:
        return end if end.code not in (None, 0) else None, ""
    except BaseException as failure:
        return failure, ""
    return None, ""


def _most_telling(own: TraceReport, children: Sequence[TraceReport]) -> TraceReport:
    """Return the report to show: the first fault of any process, else that of the one that did the training, which an error of the script ended too."""
    faulty = [r for r in (own, *children) if r.faults]
    if faulty:
        return min(faulty, key=lambda r: r.faults[0].step)
    best = max(children, key=lambda r: (r.record.backwards, r.record.ops), default=own)
    if best.record.backwards <= own.record.backwards and own.record.ops:
        return own
    return replace(best, record=replace(best.record, ended=best.record.ended or own.record.ended))


_FOLDER = "MEZZO_DOCTOR_FOLDER"
_PARENT = "MEZZO_DOCTOR_PARENT"
_STOPS = "MEZZO_DOCTOR_STOPS"
# Runs in every Python that is started with this folder on its path. It waits for torch, so that other programs pay nothing.
_SITECUSTOMIZE = """
import importlib.abc, importlib.machinery, os, sys

here = os.path.dirname(os.path.abspath(__file__))


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        from mezzo.diagnose.doctor import start
        start()


if os.environ.get("MEZZO_DOCTOR_PARENT") != str(os.getpid()):
    sys.meta_path.insert(0, AfterTorch())
own = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != here])
if own is not None and own.loader is not None:
    own.loader.exec_module(importlib.util.module_from_spec(own))
"""


def _is_script() -> bool:
    """Say whether this is the process that runs the script, and none that it started or forked."""
    return os.environ.get(_PARENT) == str(os.getpid())


def _stop(trace: Trace, why: str) -> None:
    trace.stop((_TaskStop if is_called_from("multiprocessing/pool.py") else _ScriptStop)(why))


def _write(trace: Trace) -> None:
    """Leave the report where the script's process finds it, whole or not at all. Writes: one file."""
    if get_worker_info() is not None or not trace.record.ops or _is_script():
        return
    folder = Path(os.environ[_FOLDER])
    part = folder / f"{os.getpid()}.part"
    part.write_bytes(pickle.dumps(trace.report))
    part.replace(folder / f"{os.getpid()}.report")


def _on_reached(trace: Trace) -> None:
    if get_worker_info() is None and trace.is_running and os.environ[_STOPS] == "1" and trace.report.faults:
        _write(trace)
        _stop(trace, "at the first fault")


def _finish(trace: Trace, error: BaseException | None) -> None:
    """End the trace of a process that ends, by an error or none, and leave its report."""
    if trace.is_running:
        trace.__exit__(None, error, None)
    _write(trace)


def _tell_ends(trace: Trace) -> Callable[[], None]:
    """Have what ends or replaces a process past Python tell first what was seen of it: that of the script ends as by `sys.exit`, others leave their reports.

    Returns what takes that back. Writes: functions of `os`.
    """
    before = {name: getattr(os, name) for name in ("_exit", "fork", "execv", "execve")}
    ops_at_fork = 0

    def exit_told(code: int) -> None:
        if _is_script():
            trace.stop(SystemExit(code))
        try:
            if trace.record.ops > ops_at_fork:
                _finish(trace, SystemExit(code))
        finally:
            before["_exit"](code)

    def fork() -> int:
        nonlocal ops_at_fork
        if not (child := before["fork"]()):
            ops_at_fork = trace.record.ops
        return int(child)

    def run_beside(path: Any, words: Any, environment: Any = os.environ) -> None:
        if not _is_script():
            before["execve"](path, words, environment)
        trace.stop(SystemExit(subprocess.call(words, executable=path, env=environment)))

    own = {"_exit": exit_told, "fork": fork, "execv": run_beside, "execve": run_beside}
    for name, function in own.items():
        setattr(os, name, function)
    return lambda: vars(os).update(before)


def start() -> None:
    """Trace this process until it ends. Writes: its modes, and a report in the doctor's folder."""
    if _FOLDER not in os.environ or _is_script():
        return
    trace = Trace(None, on_reached=_on_reached)
    trace.__enter__()
    _tell_ends(trace)

    def finish() -> None:
        _finish(trace, sys.exc_info()[1] or getattr(sys, "last_value", None))

    atexit.register(finish)
    # multiprocessing forgets what was registered before its own start
    util.register_after_fork(trace, lambda _: util.Finalize(None, finish, exitpriority=100))


@contextmanager
def _followed_processes(trace: Trace, reports: list[TraceReport], *, stop_at_fault: bool) -> Iterator[None]:
    """Trace what the block starts as processes of their own, each to its end or to its first fault, beside the trace of this one.

    Writes: the list of their reports, which it holds after the block, by rank; the environment, functions of `os` and a folder of
    temporary files, all as they were after.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="mezzo-doctor-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
        path = os.pathsep.join(p for p in (folder, before.get("PYTHONPATH", "")) if p)
        os.environ.update({
            _FOLDER: folder, _PARENT: str(os.getpid()), _STOPS: "1" if stop_at_fault else "0", "PYTHONPATH": path,
        })  # fmt: skip
        take_back = _tell_ends(trace)
        try:
            yield
        finally:
            take_back()
            for name in (_FOLDER, _PARENT, _STOPS, "PYTHONPATH"):
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]
            # files of our own processes, in a folder that only this user can write
            found = [pickle.loads(p.read_bytes()) for p in Path(folder).glob("*.report")]
            reports += sorted(found, key=lambda r: r.record.rank)


def _subject(text: str) -> tuple[nn.Module, Any, LossFn | None]:
    """Call the function that a text names, and return the model, the batch and the loss that it returns."""
    found = named_function(text)()
    is_subject = isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[0], nn.Module)
    if is_subject and not isinstance(found[1], Optimizer):
        return found[0], found[1], found[2] if len(found) == 3 else None
    kind = f"({', '.join(map(kind_of, found))})" if isinstance(found, tuple) else kind_of(found)
    raise ConfigError(f"{text} returned {kind}; return (model, batch) or (model, batch, loss_fn).")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckUp(Report):
    """What several tools say about one model, called as it was named; `note` is what the reader is to know of the policy."""

    subject: str
    reports: tuple[Report, ...]
    note: str = ""

    def document(self) -> Document:
        """Return the layouts one after the other, each under a heading of its own."""
        documents = [report.document() for report in self.reports]
        blocks: list[Block] = [Note(text=self.note)] if self.note else []
        for d in documents:
            blocks.append(Heading(text=f"{d.title}: {d.verdict}", tone="plain" if d.is_good else "bad"))
            blocks += d.blocks
        bad = [d for d in documents if not d.is_good]
        answer = "Not enough seen" if all(d.is_unseen for d in bad) else "To look at"
        verdict = f"{answer}: {', '.join(d.title for d in bad)}." if bad else "No fault found."
        return Document(title=f"mezzo doctor of {self.subject}", verdict=verdict, is_good=not bad, blocks=tuple(blocks))


def _policy_to_check(device: torch.device, asked: Policy, *, is_given: bool) -> tuple[Policy, str]:
    """Return a policy that casts something, and why it is not the one that would be taken. Raises: ConfigError: the one asked for casts nothing."""
    if (chosen := asked.resolve(device)).is_low:
        return chosen, ""
    if not is_given:
        return as_policy("bf16"), f"Looked at under bf16: auto is fp32 on {device}, where nothing would be cast."
    raise ConfigError(
        f"the policy '{asked}' is fp32 on {device}, where nothing is cast and nothing is to be looked at. Write 'bf16' or 'fp16'."
    )


def check_up(name: str, policy: PolicyLike | None = None, *, budget_s: float = 0.5) -> CheckUp:
    """Look at a model under a policy with every tool that needs no training loop: lint, explain and compare.

    Args:
        name: of a function, as in `named_function`, that takes nothing and returns (model, batch) or (model, batch, loss_fn).
        policy: a policy or its text; left out, auto, or bf16 where that is fp32.
        budget_s: seconds of timing for each of fp32 and the policy.

    Raises:
        ConfigError, DataError: as `named_function`, and a function that returns something else; or a policy that is fp32 on the model's device.
        PolicyError: the policy does not fit the model.

    Syncs: yes.
    """
    asked = as_policy("auto" if policy is None else policy)
    model, batch, loss_fn = _subject(name)
    chosen, note = _policy_to_check(device_of(model), asked, is_given=policy is not None)
    reports: tuple[Report, ...] = (
        lint(model, batch, loss_fn, chosen),
        explain(model, batch, chosen, loss_fn=loss_fn, budget_s=budget_s),
        compare(model, batch, loss_fn, chosen),
    )
    return CheckUp(subject=name, reports=reports, note=note)
