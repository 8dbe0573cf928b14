"""Finds the command that was asked for and turns an error into one sentence and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import MezzoError, did_you_mean

COMMANDS = {
    "bench": "measure fp32, torch.amp and mezzo side by side",
    "demo": "the recipe, then a text classifier in fp32 and in AMP, in one table",
    "doctor": "run a training script op by op and name the first fault of its numbers",
    "env": "what this machine computes natively, measured, with advice",
    "policy": "show, explain and compare policies and op tables",
    "predict": "classify lines with a trained model",
    "train": "train a BERT text classifier",
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"usage: mezzo COMMAND [OPTIONS]\n\n{rows}\n\n`mezzo COMMAND --help` shows the options of a command."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a mezzo command.

    Each command is a module of this folder with `run(argv) -> int`.

    Args:
        argv: the words after `mezzo`; `sys.argv[1:]` when left out.

    Returns:
        The exit code: 0 done, 1 the command's own "no", 2 bad input.

    Writes: standard output and error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(f"mezzo: unknown command {name!r}.{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    module = import_module(f".{name}", __package__)
    try:
        code = int(module.run(rest))
        sys.stdout.flush()
        return code
    except MezzoError as error:
        print(f"mezzo {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
