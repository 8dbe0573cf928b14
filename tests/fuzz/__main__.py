"""Run generated programs: `python -m tests.fuzz N START`; without N until one fails."""

from __future__ import annotations

import itertools
import logging
import sys
import warnings

import torch

from .program import drawn, shrunk
from .run import difference


def main(count: int | None = None, start: int = 0) -> int:
    """Run programs; print what differs, made smaller, and return how many did."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    logging.disable()
    failed = 0
    for seed in itertools.count(start) if count is None else range(start, start + count):
        program = drawn(seed)
        if found := difference(program):
            failed += 1
            small = shrunk(program, lambda one: bool(difference(one)))
            print(f"program {seed}: {found}\n  smaller: {small}\n  {difference(small)}", flush=True)
        if failed and count is None:
            break
        if (seed + 1) % 500 == 0:
            print(f"{seed + 1 - start} programs, {failed} differ", flush=True)
    print(f"{seed + 1 - start} programs, {failed} differ", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:])), 1))
