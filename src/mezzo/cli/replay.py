"""`mezzo replay`: run one step of a record again, under its policy or another, with or without the tracer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from ..diagnose import named_function, replay, segment_of, trace
from .doctor import screen_text

SAME, DIFFERENT, BAD_INPUT = 0, 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mezzo replay",
        description="Run one step of what mezzo.record kept again: from the snapshot before it, with its batches and random numbers.",
        epilog="Exit code: 0 taken and bit for bit as recorded, 1 not taken or not as recorded, 2 bad command line or record.",
    )
    parser.add_argument("folder", type=Path, help="that mezzo.record wrote")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="number of the step, from 0")
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION",
                        help="a function that returns (model, optimizer, loss_fn), made as for the run")  # fmt: skip
    parser.add_argument("--policy", help="run the step itself under another policy")
    parser.add_argument("--trace", action="store_true", help="run the step itself op by op, and name the first fault")
    parser.add_argument("--json", action="store_true", help="print JSON; what the model prints goes to standard error")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run `mezzo replay` with the words after it. Returns: its exit code. Writes: standard output and error."""
    try:
        options = _parser().parse_args(list(argv))
    except SystemExit as end:
        return SAME if end.code in (None, 0) else BAD_INPUT
    segment_of(options.folder, options.step)  # before anything of the user's is run
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        build, around = named_function(options.model), trace if options.trace else nullcontext
        found = replay(options.folder, options.step, build, policy=options.policy, around=around)
    print(found.to_json() if options.json else "\n".join(map(screen_text, filter(None, (found, found.traced)))))
    return SAME if found.is_healthy else DIFFERENT
