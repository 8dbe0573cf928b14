"""Runs programs of this folder side by side, each in a fork of this process, which has imported what all of them need.

Prints, as JSON, the exit code, the output and the errors of each that the command line names.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

from tests.device import sim


def started(name: str, folder: Path) -> int:
    """Fork a program, whose output and errors go into files; return the process's id."""
    run = importlib.import_module(f"tests.device.{name}").main
    if child := os.fork():
        return child
    code = 1
    try:
        for stream, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}.{ending}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv[1:] = []
        run()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    with sim.triton_kernels():
        pass  # imported so, Triton's own functions can be interpreted
    importlib.import_module("torch._dynamo")  # torch's first optimizer does, and it Triton
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = {program: started(program, folder) for program in sys.argv[1:]}
        codes = {program: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for program, child in children.items()}
        ends = {
            program: (code, *((folder / f"{program}.{ending}").read_text() for ending in ("out", "err")))
            for program, code in codes.items()
        }
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
