"""Runs the tests of what is about to be timed: a wrong result is not worth timing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from ..errors import BenchError


def checkout() -> Path | None:
    """Return the root of the checkout this package runs from, or None if it is installed without its tests."""
    root = Path(__file__).parents[3]
    return root if (root / "pyproject.toml").exists() and (root / "tests").is_dir() else None


def run_tests(paths: Sequence[str], root: Path | None = None) -> str:
    """Run test paths of a checkout in a fresh process.

    Args:
        paths: below the root of the checkout.
        root: the checkout; the one this package runs from when left out.

    Returns:
        One line: what pytest said, or why nothing was run.

    Raises:
        BenchError: a test failed, or a path does not exist.
    """
    root = root or checkout()
    if root is None:
        return "not run: not a checkout with tests"
    if util.find_spec("pytest") is None:
        return "not run: pytest is not installed"
    if not paths:
        return "not run: the workload names none"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"])[-1]
    if done.returncode != 0:
        raise BenchError(
            f"the tests of what would be timed do not pass ({last.strip('= ')}); mend them, or time it all the same "
            f"with --no-check. They are: pytest {' '.join(paths)}"
        )
    return last.strip("= ")
