"""Finds the command that was asked for and turns an error into one sentence and exit code 2."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from itertools import zip_longest
from typing import TextIO, cast

from .. import __version__
from ..errors import ConfigError, MezzoError, did_you_mean, first_line, is_out_of_memory
from ..extras import check_installed
from ..files import BestEffort


@dataclass(frozen=True, slots=True)
class Command:
    """A command, a module of this folder with `run(argv) -> int`: what it does, in a line, and the packages it needs beside those of every installation."""

    text: str
    packages: tuple[str, ...] = ("tyro", "rich")


COMMANDS = {
    "bench": Command("measure fp32, torch.amp and mezzo side by side"),
    "demo": Command(
        "the recipe and a text classifier, in fp32 and in AMP, in one table",
        ("tyro", "rich", "matplotlib", "transformers", "sklearn", "snownlp"),
    ),
    "doctor": Command("run a script op by op and name the first fault of its numbers", ()),
    "env": Command("what this machine computes natively, measured, with advice"),
    "policy": Command("show, explain and compare policies and op tables"),
    "predict": Command("classify lines with a trained model", ("tyro", "transformers")),
    "replay": Command("run one step of a record again", ()),
    "train": Command("train a BERT text classifier", ("tyro", "rich", "matplotlib", "transformers", "sklearn")),
    "completion": Command("print the completion script of a shell: bash, zsh or fish", ("tyro",)),
}
_ELSEWHERE = {
    **dict.fromkeys(("compare", "explain", "lint"), "doctor --model MODULE:FUNCTION"), **dict.fromkeys(("trace", "watch"), "doctor script.py"),
    **{name: f"policy {name}" for name in ("show", "ops", "why", "diff")}, **dict.fromkeys(("launch", "run"), "train --nproc N"), "version": "--version",
}  # fmt: skip
"""What to write for a tool that has no command, an action of `mezzo policy`, and commands of other libraries."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_PATHS = ("--out", "--data", "--dev-data", "--test-data", "--label-map", "--model")
_AGAIN_SECONDS = 0.2
_LESS = "Ask for less at a time: a smaller --batch-size, or a smaller model."
_HELP, _VERSION = ("-h", "--help"), ("-V", "--version")


def usage(form: str, texts: Mapping[str, str]) -> str:
    """Return how a command line is written, "COMMAND" or "bench WORKLOAD", and what may stand for its last word, each with a text."""
    width, word = max(map(len, texts)), form.rpartition(" ")[2]
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in texts.items())
    return f"usage: mezzo {form} [OPTIONS]\n\n{rows}\n\n`mezzo {form} --help` shows the options of a {word.lower()}"


def exit_code(end: KeyboardInterrupt) -> int:
    """Return the exit code of a command that Ctrl-C, or the signal that it names, has ended."""
    return 128 + (end.args[0] if end.args else signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a mezzo command, given the words after `mezzo`; `sys.argv[1:]` when left out.

    Returns the exit code: 0 done, 1 the command's own "no", 2 bad input. Writes: standard output and error.
    """
    _accept_any_text()
    words = list(sys.argv[1:] if argv is None else argv) or ["help"]
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    name, rest = words[0], words[1:]
    if name not in COMMANDS and name not in (*_HELP, *_VERSION):
        hint = f" Write `mezzo {_ELSEWHERE[name]}`." if name in _ELSEWHERE else did_you_mean(name, COMMANDS)
        print(f"mezzo: unknown command {name!r}.{hint}", file=sys.stderr)
        return 2
    return _run(name, rest)


def _accept_any_text() -> None:
    """Have what a terminal cannot show printed as escapes, and what a closed stream, or standard error, does not take dropped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("NO_COLOR") or sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")  # tyro asks standard output alone, and not NO_COLOR
    if not isinstance(sys.stderr, BestEffort):
        sys.stderr = cast(TextIO, BestEffort(sys.stderr))


def _run(name: str, words: Sequence[str]) -> int:
    """Run a command and return its exit code; what goes wrong outside of it is one sentence."""
    try:
        _check_words(words, are_options=name != "doctor")  # whose words are a script's
        if name not in COMMANDS:
            commands = usage("COMMAND", {name: command.text for name, command in COMMANDS.items()})
            shown = f"{commands};\n`mezzo --version` shows the version."
            print(shown if name in _HELP else f"mezzo {__version__}", flush=True)
            return 0
        check_installed(f"the command {name}", COMMANDS[name].packages)
        with nullcontext() if name == "doctor" else _ended_by_signals():  # a script may catch what it likes
            code = int(import_module(f".{name}", __package__).run(words))
        sys.stdout.flush()
        return code
    except (MezzoError, MemoryError, RuntimeError) as error:
        if not isinstance(error, MezzoError) and not is_out_of_memory(error):
            raise
        text = str(error) if isinstance(error, MezzoError) else f"memory ran out: {first_line(error)}. {_LESS}"
        return _refuse(name, text)
    except KeyboardInterrupt as end:
        return exit_code(end)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        drop_the_rest()
        return 141
    except OSError as error:
        where = f"{error.filename or 'standard output'}: " if error.filename or error.errno in _FULL else ""
        return _refuse(name, f"{where}{error.strerror or error}.")


def _check_words(words: Sequence[str], *, are_options: bool) -> None:
    if any("\0" in word for word in words):
        raise ConfigError("a word on the command line holds a NUL character.")
    for word, value in zip_longest(words, words[1:]) if are_options else ():
        option, is_joined, joined = word.partition("=")
        if option in _PATHS and (joined if is_joined else value) == "":
            raise ConfigError(
                f"{option} was given an empty text, and takes a path. Write {option} . for the current folder."
            )


class _Ended(KeyboardInterrupt):
    """The end by a signal. A plain `KeyboardInterrupt`, once it has passed through an extension, has Python end by SIGINT, whatever is returned."""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM, as Ctrl-C, end the block with a `KeyboardInterrupt`, raised anew while something, such as a `__del__`, has swallowed it.

    A launcher sends signals to its ranks by itself.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if "TORCHELASTIC_RUN_ID" in os.environ or threading.current_thread() is not threading.main_thread():
        numbers = []

    def end(number: int, frame: object) -> None:
        def end_again(*_: object) -> None:
            error = sys.exc_info()[1]
            while error is not None and not isinstance(error, KeyboardInterrupt):
                error = error.__context__
            if error is None:  # else it is on its way
                raise _Ended(number)

        if hasattr(signal, "setitimer"):
            before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, end_again))
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        raise _Ended(number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        if len(before) > len(numbers):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def terminal_width() -> int | None:
    """Return the columns of the terminal that standard output is; None where it is none, and lines stay whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _refuse(name: str, sentence: str) -> int:
    """Print why a command is not done, half an emoji, which UTF-8 lacks, as its escape. Returns: the exit code."""
    print(f"mezzo {name}: {sentence.encode('utf-8', 'backslashreplace').decode()}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        drop_the_rest()
    return 2


def drop_the_rest() -> None:
    """Drop what standard output did not take, which Python would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
