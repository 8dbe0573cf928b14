"""`mezzo demo`: the recipe, then a text classifier in fp32 and in mixed precision, then one table of both."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..bench import (
    Measurement,
    Plan,
    Recipe,
    Result,
    Reviews,
    cells,
    default_device,
    machine_name,
    parse_device,
    text_table,
)
from ..errors import ConfigError
from ..formats import dtype_name, native_support
from ..policy import Policy
from .bench import json_of_all, measured, open_folder, save

NOT_TESTED = "not run: a demonstration"
MEANING = """prepare: mezzo.prepare with the policy behind it; kept: the C library keeps what a step frees, for the next (docs/memory.md).
Peak memory is above the process's baseline after import."""
COLUMNS = ("variant", "time", "faster than fp32", "peak memory", "of fp32's", "loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Options of `mezzo demo`.

    Attributes:
        out: folder for runs, figures and pictures.
        device: cpu or cuda.
        rounds: how often the recipe is timed.
        rows: training rows of the text classifier at most.
        json: print the results as JSON instead of the table.
    """

    out: Path = Path("runs/demo")
    device: str = "cpu"
    rounds: int = 3
    rows: int = 100_000
    json: bool = False


def low_dtype(device: torch.device) -> torch.dtype:
    """Return the 16-bit dtype that mixed precision takes on a device: that of policy auto, else bf16. Syncs: no."""
    chosen = Policy.parse("auto").resolve(device).compute
    return torch.bfloat16 if chosen in (None, torch.float32) else chosen


def measure_both(options: DemoOptions) -> Iterator[Result]:
    """Yield the recipe and the whole training, fp32 beside mixed precision. Writes: `options.out`, standard error."""
    device = parse_device(options.device)
    plan = Plan(
        variants=Recipe.default_variants(device), rounds=options.rounds, device=options.device,
        dtype=dtype_name(low_dtype(device)),
    )  # fmt: skip
    print("1/2  the recipe: linear layers, random batches", file=sys.stderr, flush=True)
    yield measured(Recipe.for_device(device), plan, NOT_TESTED)
    print("2/2  a text classifier on Chinese reviews, in fp32, then in mixed precision", file=sys.stderr, flush=True)
    reviews = Reviews(folder=str(options.out / "reviews"), rows=options.rows)
    yield measured(reviews, replace(plan, variants=Reviews.variants, rounds=1), NOT_TESTED)


def _row(result: Result, measurement: Measurement) -> tuple[str, ...]:
    said = cells(result, measurement)
    accuracy = measurement.measures.get("accuracy")
    shown = "-" if accuracy is None else f"{accuracy:.4f}"
    return (result.workload, *(said[name] for name in COLUMNS), shown)


def _print(results: Sequence[Result], pictures: Sequence[Path], device: torch.device) -> None:
    sections = [[_row(result, measurement) for measurement in result.measurements] for result in results]
    table = text_table(("job", *COLUMNS, "test accuracy"), sections)
    low = dtype_name(low_dtype(device))
    print(f"on {machine_name(results[0])}, mixed precision in {low}", table, "", MEANING, sep="\n")
    native = native_support(device, low_dtype(device))
    if not native.native:
        print(
            f"This device has no fast units for {low} ({native.reason}), so mixed precision saves memory here, not time; `mezzo env` measures it."
        )
    for path in pictures:
        print(path)


def run(argv: Sequence[str]) -> int:
    """Run `mezzo demo` with the words after it. Returns: 0 done.

    Raises:
        BenchError: a device that is not there, or a variant that failed.
        ConfigError: no rounds, or no rows, or a folder that cannot be made or written.

    Writes: the folder of the demo, standard output and error. Syncs: yes.
    """
    import tyro

    options = tyro.cli(DemoOptions, prog="mezzo demo", args=list(argv), default=DemoOptions(device=default_device()))
    for name in ("rounds", "rows"):
        if (value := getattr(options, name)) < 1:
            raise ConfigError(f"--{name} {value}: give at least 1, or leave it out.")
    open_folder(options.out)
    results: list[Result] = []
    pictures: list[Path] = []
    try:
        for result in measure_both(options):
            results.append(result)
            pictures.append(save(result, options.out)[1])
        pictures += [options.out / "reviews" / name / "curves.png" for name in Reviews.variants]
    finally:  # what failed loses nothing of what was measured before it
        if results and options.json:
            print(json_of_all(results))
        elif results:
            _print(results, pictures, parse_device(options.device))
    return 0
