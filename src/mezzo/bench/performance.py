"""Makes the page of measured figures from the stored results: no figure on it is written by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import BenchError, did_you_mean
from .machine import short_name
from .measurement import Result, load
from .results_table import footnotes, machine_name, markdown_table, title
from .workload import WORKLOADS

RESULTS = Path("benchmarks/results")
PAGE = Path("docs/performance.md")
INTRODUCTION = """# Performance

This page is made from `benchmarks/results/*.json` by `mezzo bench docs`; a test holds it to them.

How to read it: each variant ran in a process of its own, the rounds took the variants in turn, and the figures are
medians over the rounds, with the fastest and the slowest beside them. "Faster than" is a ratio of medians in one run;
a compiled variant is held against `torch-amp+compile`. "Of roofline" is the least time the machine could take, from
limits measured in the same run, over the time it took: 100% cannot be beaten. Peak memory is what the process held
above its size after import; on CUDA, what was allocated. The loss is taken after the last round, at the same number
of steps for every variant. Raw samples, versions, clocks and commits stand in the JSON.

Any row can be measured again with `mezzo bench WORKLOAD`; `mezzo bench` lists the workloads.
"""


def newest(results: Sequence[Result]) -> list[Result]:
    """Return the latest result of each workload at its sizes on each machine, in the order of the workloads."""
    found: dict[tuple[int, str, tuple[str, ...]], Result] = {}
    for result in sorted(results, key=lambda r: r.date):
        place = list(WORKLOADS).index(result.workload)
        found[place, short_name(result.machine), tuple(result.rooflines)] = result
    return [found[key] for key in sorted(found)]


def _section(result: Result, picture: str | None) -> str:
    versions = result.machine["versions"]
    taken = (
        f"Taken {result.date[:10]} with torch {versions['torch']}, mezzo {versions['mezzo']}, commit "
        f"{result.machine['commit'] or 'unknown'}, {result.plan['dtype']}."
    )
    parts = [f"### {machine_name(result)}", f"{title(result)}.", markdown_table(result)]
    parts += [f"![{title(result)}]({picture})"] if picture else []
    return "\n\n".join([*parts, " ".join([*footnotes(result), taken])])


def page(folder: Path, place: Path) -> str:
    """Return the page of the newest results in a folder.

    Args:
        folder: where the JSON and the pictures lie.
        place: where the page will lie; links to pictures are relative to it.

    Raises:
        BenchError: a file in the folder is not a result, or of no workload there is.
    """
    stored = {path: load(path) for path in sorted(folder.glob("*.json"))}
    for path, result in stored.items():
        if result.workload not in WORKLOADS:
            raise BenchError(f"{path}: unknown workload {result.workload!r}.{did_you_mean(result.workload, WORKLOADS)}")
    chosen = newest(list(stored.values()))
    parts, last = [INTRODUCTION.rstrip()], ""
    for result in chosen:
        if result.workload != last:
            last = result.workload
            parts.append(f"## {last}\n\n{WORKLOADS[last][1].capitalize()}.")
        png = next(path for path, kept in stored.items() if kept is result).with_suffix(".png")
        picture = os.path.relpath(png, place.parent) if png.exists() else None
        parts.append(_section(result, picture))
    if not chosen:
        parts.append("No results are stored yet.")
    return "\n\n".join(parts) + "\n"
