"""`mezzo doctor`: run a training script under the tracer, or look at a model, and say what is wrong with its numbers."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from ..diagnose import ScriptRun, check_up, trace_script
from ..errors import ConfigError, MezzoError, shown
from ..extras import check_installed
from ..files import check_writable
from ..report import Report, render_text

_LONGEST = 200
_OTHER = {
    True: "--model: a script runs in the precision it asks for itself",
    False: "a script: with --model one step is looked at",
}
_RUNNERS = ("mezzo", "runpy", "importlib", "_frozen_importlib", "_frozen_importlib_external")
"""Packages whose frames lead to those of a user."""
HEALTHY, FAULTY, BAD_INPUT, UNSEEN, UNTRACED = 0, 1, 2, 3, 4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mezzo doctor",
        description="Run an unmodified PyTorch script op by op and name the first fault of its numbers: which op, "
        "which module, which line, why, and what fixes it. Options of mezzo come before the script. "
        "Or, with --model, look at one step of a model under a policy: its warnings, its casts, its gain.",
        epilog="Exit code: 0 healthy, 1 faulty, 2 bad command line or script, 3 not enough seen to say either (nothing went backward, the "
        "script ended by itself, every step was left out), 4 nothing was traced.",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="end the script after N optimizer steps")
    parser.add_argument("--all", action="store_true", help="go on after the first fault")
    parser.add_argument("--full", action="store_true", help="print tensors, magnitudes by layer and by line too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one HTML page")
    parser.add_argument("--json", action="store_true", help="print JSON; what the script prints goes to standard error")
    parser.add_argument("--model", metavar="MODULE:FUNCTION",
                        help="look at the (model, batch) or (model, batch, loss_fn) that a function returns")  # fmt: skip
    parser.add_argument("--policy", help="the policy for --model; default: auto, or bf16 where that is fp32")
    parser.add_argument("-m", dest="is_module", action="store_true",
                        help="the script is a module, as python -m takes it")  # fmt: skip
    parser.add_argument("script", nargs="?", help="path of the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def _check(options: argparse.Namespace) -> None:
    if (options.script is None) == (options.model is None):
        raise ConfigError("give either a script or --model MODULE:FUNCTION.")
    of_model, of_script = {"policy": options.policy}, {"steps": options.steps, "all": options.all or None}
    for name, value in (of_model if options.model is None else of_script).items():
        if value is not None:
            raise ConfigError(f"--{name} is for {_OTHER[options.model is None]}. Leave it out.")
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: give a number of steps of at least 1, or leave it out.")
    if (html := options.html) is not None:
        if html.is_dir() or html.suffix == ".py":
            kind = "folder; give the path of a file" if html.is_dir() else "program; give the path of a page"
            raise ConfigError(f"--html {html}: a {kind}.")
        if not html.parent.is_dir():
            raise ConfigError(f"--html {html}: its folder does not exist; create it first.")
        check_installed("--html", ["jinja2"])
        check_writable("--html", html)


def _user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error from the first frame that is the user's: none for what Python cannot read, all where there is none."""
    frames = error.__traceback__
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0] in _RUNNERS:
        frames = frames.tb_next
    return error.__traceback__ if frames is None and not isinstance(error, SyntaxError) else frames


def _tell_error(what: str, error: BaseException) -> None:
    """Say that what the user wrote has failed, without the frames of what runs it."""
    if not isinstance(error, SystemExit):
        print("".join(traceback.format_exception(error.with_traceback(_user_frames(error)))), file=sys.stderr, end="")
    print(f"mezzo doctor: {what} ended by itself with {shown(error, _LONGEST)}.", file=sys.stderr)


def _tell_end(run: ScriptRun) -> None:
    if run.error is not None:
        _tell_error("the script", run.error)
    if run.children:
        told = ", ".join(f"rank {r.record.rank} {r.answer}" for r in run.children)
        print(f"mezzo doctor: {len(run.children)} processes of the script were traced: {told}.", file=sys.stderr)
    if run.stopped:
        print(f"mezzo doctor: the script was ended {run.stopped}.", file=sys.stderr)


@contextmanager
def _copied(stream: TextIO) -> Iterator[TextIO]:
    """Yield another stream to the same file, for a script that may close it; the stream itself where it leads to none."""
    try:
        copy = open(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors=stream.errors)
    except (OSError, ValueError):
        yield stream
        return
    try:
        yield copy
    finally:
        with suppress(ValueError):  # the script detached its buffer
            copy.close()


def screen_text(report: Report, *, full: bool = False) -> str:
    """Return a report as standard output takes it: in colour where it is a terminal that wants it, folded to its width."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return render_text(report.document(), width=shutil.get_terminal_size((100, 0)).columns, colour=colour, full=full)


def _print(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        print(report.to_json())
    else:
        text = screen_text(report, full=options.full)
        print(text)
        if not options.full and text != screen_text(report, full=True):
            where = "" if options.script is None else ", before the script"
            print(f"\nMore with --full, or on a page with --html FILE{where}.")
    if options.html is not None:
        report.to_html(options.html)
        print(f"mezzo doctor: the page is {options.html}.", file=sys.stderr)


def run(argv: Sequence[str]) -> int:
    """Run `mezzo doctor` with the words after it. Returns: its exit code. Writes: standard output and error, and the page `--html` names."""
    try:
        options = _parser().parse_args(list(argv))
    except SystemExit as end:
        return HEALTHY if end.code in (None, 0) else BAD_INPUT
    _check(options)
    options.html = options.html and options.html.absolute()
    with _copied(sys.stdout) as out, redirect_stdout(sys.stderr if options.json else out), redirect_stderr(sys.stderr):
        if options.model is not None:
            try:
                report: Report = check_up(options.model, options.policy)
            except MezzoError:
                raise
            except (Exception, SystemExit) as error:
                _tell_error(options.model, error)
                return UNSEEN
            code = HEALTHY if report.is_healthy else UNSEEN if report.document().is_unseen else FAULTY
        else:
            how = {"steps": options.steps, "stop_at_fault": not options.all, "is_module": options.is_module}
            traced = trace_script(options.script, options.args, **how)
            _tell_end(traced)
            report, codes = traced.report, {"faulty": FAULTY, "healthy": HEALTHY, "not enough seen": UNSEEN}
            code = codes[report.answer] if report.record.ops else UNTRACED if traced.error is None else UNSEEN
    _print(report, options)
    return code
