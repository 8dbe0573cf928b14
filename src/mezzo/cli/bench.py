"""`mezzo bench WORKLOAD`: measure ways of running a workload side by side."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..bench import (
    WORKLOADS,
    Plan,
    Progress,
    Result,
    Workload,
    checked_points,
    default_device,
    find_workload,
    load,
    measure,
    parse_device,
    print_result,
    run_tests,
    save_chart,
    short_name,
)
from ..errors import BenchError, ConfigError
from ..files import check_writable, write_text
from .main import usage

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """Options of every benchmark beside its plan.

    Attributes:
        check: run the tests of the timed code first, and refuse to time it if they fail.
        quick: take, where no other is written, a size that only shows that everything runs; the figures mean nothing.
        out: folder for the JSON and the picture.
        json: print the JSON instead of the table.
    """

    check: bool = True
    quick: bool = False
    out: Path = Path("runs/bench")
    json: bool = False


_OTHERS = {"all": "every workload in turn"}


def _read_ahead(argv: Sequence[str]) -> tuple[torch.device, bool]:
    """Read --device and --quick ahead of the rest, whose defaults depend on them."""
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--device", nargs="?", default=default_device(), const=default_device())
    ahead.add_argument("--quick", action=argparse.BooleanOptionalAction)
    known, _ = ahead.parse_known_args(argv)
    return parse_device(known.device), bool(known.quick)


def parse(name: str, argv: Sequence[str]) -> tuple[BenchOptions, Plan, Workload]:
    """Return the options, the plan and the workload that a command line asks for.

    Raises:
        BenchError: unknown workload, variant or device, nothing to measure, or a variant that cannot do it.
        SystemExit: an option that does not exist, or --help.
    """
    import tyro

    kind, (device, is_quick) = find_workload(name, _OTHERS), _read_ahead(argv)
    usual = kind.for_device(device)
    plan = Plan(variants=kind.default_variants(device), device=str(device))
    fields: list[tuple[str, Any, Any]] = [
        ("plan", tyro.conf.OmitArgPrefixes[Plan], dataclasses.field(default=plan)),
        ("bench", tyro.conf.OmitArgPrefixes[BenchOptions], dataclasses.field(default=BenchOptions())),
        (name, tyro.conf.OmitArgPrefixes[kind], dataclasses.field(default=usual.quick() if is_quick else usual)),  # type: ignore[misc,valid-type]  # a class found by name
    ]
    asked: Any = tyro.cli(
        dataclasses.make_dataclass("Bench", fields, frozen=True),
        prog=f"mezzo bench {name}", description=WORKLOADS[name][1], args=list(argv),
    )  # fmt: skip
    checked_points(getattr(asked, name), asked.plan)
    return asked.bench, asked.plan, getattr(asked, name)


def _progress_bar() -> Bar:
    """Return a bar on standard error that draws only when told to: nothing may run beside a sample."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(*columns, console=Console(file=sys.stderr), auto_refresh=False, transient=True)


def measured(workload: Workload, plan: Plan, tests: str) -> Result:
    """Return the result of a workload, with a progress bar on a terminal. Writes: standard error."""
    bar = _progress_bar() if sys.stderr.isatty() and not workload.talks else None
    with bar or nullcontext():
        progress: Progress | None = None
        if bar is not None:
            task = bar.add_task("starting one process for each variant")

            def progress(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total, refresh=True)

        return measure(workload, plan, tests=tests, progress=progress)


def open_folder(folder: Path) -> None:
    """Make the folder that a result goes into. Raises: ConfigError: it cannot be made, or written. Writes: the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: no such folder can be made: {error.strerror}. Name a folder that can be."
        ) from None
    check_writable("--out", folder)


def save(result: Result, folder: Path) -> tuple[Path, Path]:
    """Write a result's JSON and picture into a folder, each whole or not at all, and return their paths.

    Raises: OSError: one could not be written.

    Writes: both files, over those of the same day, machine and kind; other sizes, results of compiled variants alone, and those
    beside a file that is no result get a number.
    """
    stem = f"{result.workload}_{short_name(result.machine)}_{result.date[:10]}"

    def is_free(path: Path) -> bool:
        try:
            return not path.exists() or load(path).kind == result.kind
        except BenchError:  # somebody's file
            return False

    names = (f"{stem}{suffix}.json" for suffix in itertools.chain([""], (f"_{n}" for n in itertools.count(2))))
    data = next(filter(is_free, map(folder.joinpath, names)))
    picture = data.with_suffix(".svg")
    write_text(data, result.to_json())
    save_chart(result, picture)
    return data, picture


@functools.cache
def _tested(path: str) -> str:
    return f"{path} {run_tests([path])}"


def tests_of(workload: Workload) -> str:
    """Run the tests of what a workload times, each path once in a process's life, and return what they said. Raises: BenchError: one failed."""
    return "; ".join(_tested(path) for path in workload.tests)


def json_of_all(results: Sequence[Result]) -> str:
    """Return one JSON document of results, by workload."""
    return json.dumps({result.workload: json.loads(result.to_json()) for result in results}, indent=1)


def _print_and_save(result: Result, options: BenchOptions, is_alone: bool) -> None:
    """Print a result, unless its JSON is printed with that of others, and save it. Writes: files, standard output."""
    try:
        if not options.json:
            print_result(result)
        elif is_alone:
            print(result.to_json(), end="", flush=True)
    finally:  # neither a full disk nor a closed pipe loses it
        data, picture = save(result, options.out)
    if not options.json:
        print(f"\n{data}\n{picture}")


def run(argv: Sequence[str]) -> int:
    """Run `mezzo bench` with the words after it."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage("bench WORKLOAD", {name: text for name, (_, text) in WORKLOADS.items()} | _OTHERS) + ".")
        return 0
    name, rest = argv[0], argv[1:]
    asked = [parse(one, rest) for one in (WORKLOADS if name == "all" else (name,))]
    results: list[Result] = []
    try:
        for options, plan, workload in asked:
            open_folder(options.out)
            tests = tests_of(workload) if options.check else "not run: --no-check"
            results.append(measured(workload, plan, tests))
            _print_and_save(results[-1], options, is_alone=name != "all")
    finally:  # what failed loses nothing of what was measured before it
        if name == "all" and options.json and results:
            print(json_of_all(results))
    return 0
