"""The page of measured figures, and the README's: made from the stored results, no figure is written by hand.

Run: `python benchmarks/performance.py [--results FOLDER] [--page FILE] [--readme FILE] [--check]`

It writes `docs/performance.md` and, in README.md, what stands between two marks; `--check` writes nothing, and exits with 1 where one of them is not what
the results make of it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from mezzo.bench import WORKLOADS, Measurement, Result, cells, header, label, load, machine_name, short_name
from mezzo.bench.results_table import MISSING, fastest_rival, footnotes, points_of, title
from mezzo.errors import BenchError, MezzoError, did_you_mean, plural
from mezzo.files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
PEAK = "peak memory of the rival's"
POLICIES = ("prepare", "prepare-master")
TRAINED = ("recipe", "text", "bert", "gpt2", "llama", "vit", "resnet", "lstm")
"""The workloads that are training steps of a model at one size."""
INTRODUCTION = """# Performance

This page is made from `benchmarks/results/*.json` by `python benchmarks/performance.py`; a test holds it to them.

How to read it: each variant ran in a process of its own, the rounds took the variants in turn, and the figures are
medians over the rounds, with the fastest and the slowest beside them. "Faster than" is a ratio of medians in one run.
`prepare` names its policy; "kept" means that the C library keeps what a step frees, by `mezzo.keep_memory()` or, for
other libraries, by the environment; "compiled" means `torch.compile`, "captured" a step that `amp.capture` replays as a CUDA graph. A rival is the mixed
precision of another library, and the fastest one run in the same way, not captured, counts. "Of roofline" is the least time the machine could take, from
limits measured in the same run, over the time it took: 100% cannot be beaten. Peak memory is what the process held
above its size after import; on CUDA, what was allocated. The loss is taken after the last round, at the same number
of steps for every variant. Raw samples, versions, clocks and commits stand in the JSON.

Any row can be measured again with `mezzo bench WORKLOAD`; `mezzo bench` lists the workloads.
"""
BESIDE_RIVALS = """## Beside the fastest rival

How many times as fast `mezzo.prepare` is under each policy as the fastest rival in the same run. Of three figures the first is with nothing kept, the second with
mezzo's memory kept and the rival as people run it, the third with memory kept on both sides. Each is a win where medians and the middle half of the rounds agree, else
a tie or a loss, which is said; a dash was not measured."""


def markdown_table(result: Result) -> str:
    """Return the table of a result as Markdown, figures flush right."""
    head = header(result)
    rule = tuple(":---" if name in ("point", "variant") else "---:" for name in head)
    return markdown([head, rule, *([*cells(result, measurement).values()] for measurement in result.measurements)])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of words, of which the second says how columns are set, as a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def newest(results: Sequence[Result]) -> list[Result]:
    """Return the latest result of each workload and kind on each machine, in the order of the workloads."""
    found: dict[tuple[int, str, tuple[bool, tuple[str, ...]]], Result] = {}
    for result in sorted(results, key=lambda r: r.date):
        place = list(WORKLOADS).index(result.workload)
        found[place, short_name(result.machine), result.kind] = result
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


def _loaded(folder: Path) -> dict[Path, Result]:
    stored = {path: load(path) for path in sorted(folder.glob("*.json"))}
    if not stored:
        raise BenchError(
            f"there is no result of a benchmark in {folder}. Write --results with the folder of their JSON."
        )
    for path, result in stored.items():
        if result.workload not in WORKLOADS:
            raise BenchError(f"{path}: unknown workload {result.workload!r}.{did_you_mean(result.workload, WORKLOADS)}")
    return stored


def page(folder: Path, place: Path) -> str:
    """Return the page of the newest results in a folder, with links to pictures relative to where the page will lie.

    Raises:
        BenchError: no result is in the folder, or a file that is none, or of no workload there is.
    """
    stored = _loaded(folder)
    chosen = newest(list(stored.values()))
    parts, last = [INTRODUCTION.rstrip(), f"{BESIDE_RIVALS}\n\n{figures(folder)}"], ""
    for result in chosen:
        if result.workload != last:
            last = result.workload
            parts.append(f"## {last}\n\n{WORKLOADS[last][1].capitalize()}.")
        drawn = next(path for path, kept in stored.items() if kept is result).with_suffix(".svg")
        picture = os.path.relpath(drawn, place.parent) if drawn.exists() else None
        parts.append(_section(result, picture))
    return "\n\n".join(parts) + "\n"


class Comparison(NamedTuple):
    """A measurement held against the fastest rival: median seconds of the rival over its own, and the same of each round."""

    ratio: float
    ratios: tuple[float, ...]

    @property
    def outcome(self) -> str:
        """Return "win" or "loss" where the medians and the middle half of the rounds agree, else "tie"."""
        if len(self.ratios) < 2:
            return "tie"
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return "win" if min(low, self.ratio) > 1 else "loss" if max(high, self.ratio) < 1 else "tie"


def compare(result: Result, measurement: Measurement, *, keeps: bool, compiled: bool) -> Comparison | None:
    """Return a measurement beside the fastest rival that keeps memory or does not; None where there is none."""
    rival = fastest_rival(result, measurement.point, keeps=keeps, compiled=compiled)
    if rival is None:
        return None
    return Comparison(
        ratio=rival.median / measurement.median,
        ratios=tuple(r / m for r, m in zip(rival.seconds, measurement.seconds, strict=True)),
    )


def _told(found: Sequence[Comparison]) -> str:
    """Return one comparison with its outcome, a win unless it is said, or the ends of several with how many were won, tied and lost."""
    if not found:
        return MISSING
    if len(found) == 1:
        return f"{found[0].ratio:.2f}x {found[0].outcome}".removesuffix(" win")
    return f"{min(one.ratio for one in found):.2f}-{max(one.ratio for one in found):.2f}x: {_counts(found)}"


def _counts(found: Sequence[Comparison]) -> str:
    outcomes = [one.outcome for one in found]
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("win", "tie", "loss") if kind in outcomes)


class _Cell(NamedTuple):
    """A workload under a policy at all its sizes on one machine, held against the fastest rival run in the same way."""

    ways: list[list[Comparison]]  # with nothing kept, with mezzo's memory kept alone, and with both kept
    shares: list[float]  # peak memory as a part of the rival's, at each size

    @property
    def text(self) -> str:
        return " / ".join(_told(found) for found in self.ways)

    @property
    def as_recommended(self) -> str:
        """Return the geometric mean over the sizes, mezzo's memory kept where that was measured, and what was not won."""
        found = next((way for way in (*self.ways[1:2], *self.ways) if way), [])
        if not found:
            return MISSING
        outcomes = [one.outcome for one in found]
        told = (f"{outcomes.count(kind)} {kind}" if found[1:] else kind for kind in ("tie", "loss") if kind in outcomes)
        mean = f"{statistics.geometric_mean(one.ratio for one in found):.2f}x"
        return " ".join([mean, *told])


def _cell(result: Result, policy: str, compiled: bool) -> _Cell | None:
    end = "+compile" if compiled else ""
    bare = {m.point: m for m in result.measurements if m.variant == f"{policy}{end}"}
    kept = {m.point: m for m in result.measurements if m.variant == f"{policy}+keep{end}"}
    if not bare and not kept:
        return None

    def against(own: Mapping[str, Measurement], keeps: bool) -> list[Comparison]:
        found = (compare(result, m, keeps=keeps, compiled=compiled) for m in own.values())
        return [one for one in found if one is not None]

    ways = [against(bare, False), *((against(kept, False), against(kept, True)) if kept else ())]
    beside = [(m, fastest_rival(result, m.point, keeps=False, compiled=compiled)) for m in (kept or bare).values()]
    shares = [m.peak_bytes / rival.peak_bytes for m, rival in beside if rival is not None and rival.peak_bytes > 0]
    return _Cell(ways, shares)


def _newest_on(device: str, folder: Path) -> list[Result]:
    return [one for one in newest(list(_loaded(folder).values())) if one.machine["device"] == device]


class _Row(NamedTuple):
    workload: str
    policy: str
    compiled: bool


def _tables(folder: Path) -> list[dict[_Row, dict[str, _Cell]]]:
    """Return what stands in a table's lines under the names of its columns: one table with a column a CPU, one with two a GPU."""
    devices = {"cpu": {"": ""}, "cuda": {"": ", eager", "+capture": ", captured"}}
    found: list[dict[_Row, dict[str, _Cell]]] = []
    for device, ends in devices.items():
        rows: dict[_Row, dict[str, _Cell]] = {}
        for result, policy, compiled in product(_newest_on(device, folder), POLICIES, (False, True)):
            points = points_of(result)
            name = f"`{result.workload}` {points[0] if len(points) == 1 else f'{len(points)} sizes'}"
            for end, way in ends.items():
                if (cell := _cell(result, policy + end, compiled)) is not None:
                    row = rows.setdefault(_Row(name, _policy_name([result], policy), compiled), {})
                    row[machine_name(result) + way] = cell
        found += [rows] if rows else []
    return found


def _columns(rows: Mapping[_Row, Mapping[str, _Cell]]) -> list[str]:
    return sorted({column for cells in rows.values() for column in cells})


def _peak(cells: Iterable[_Cell]) -> str:
    shares = [share for cell in cells for share in cell.shares]
    low, high = (f"{end(shares):.2f}x" for end in (min, max)) if shares else (MISSING, MISSING)
    return low if low == high else f"{low[:-1]}-{high}"


def figures(folder: Path) -> str:
    """Return the tables of every policy of `mezzo.prepare` beside the fastest rival, from the newest results: a column a CPU, two a GPU. Raises: as `page`."""
    return "\n\n".join(map(_in_full, _tables(folder)))


def _in_full(rows: Mapping[_Row, Mapping[str, _Cell]]) -> str:
    columns = _columns(rows)
    table = [("workload", "policy", *columns, PEAK), ("---", "---", *["---:"] * (len(columns) + 1))]
    for (workload, policy, compiled), by_column in rows.items():
        told = [by_column[column].text if column in by_column else MISSING for column in columns]
        table.append((f"{workload}{', compiled' if compiled else ''}", policy, *told, _peak(by_column.values())))
    return markdown(table)


def summary(folder: Path) -> str:
    """Return the figures in short: a line a workload, eager and as recommended, each policy beside the other, and what all figures come to. Raises: as `page`."""
    return "\n\n".join(map(_in_short, _tables(folder)))


def _in_short(rows: Mapping[_Row, Mapping[str, _Cell]]) -> str:
    columns, policies = _columns(rows), dict.fromkeys(one.policy for one in rows)
    table = [("workload", *columns, PEAK), ("---", *["---:"] * (len(columns) + 1))]
    for name in dict.fromkeys(one.workload for one in rows if not one.compiled):
        beside = [rows.get(_Row(name, policy, compiled=False), {}) for policy in policies]
        joined = []
        for column in columns:
            told = [cells[column].as_recommended if column in cells else MISSING for cells in beside]
            joined.append(MISSING if {*told} == {MISSING} else ", ".join(told))
        table.append((name, *joined, _peak(cell for cells in beside for cell in cells.values())))
    every = [[cells[column] for cells in rows.values() if column in cells] for column in columns]
    counts = [_counts([one for cell in cells for way in cell.ways for one in way]) for cells in every]
    return markdown([*table, ("all ways to run them", *counts, MISSING)])


def sentence(folder: Path) -> str:
    """Return what the figures come to, from the newest training steps on a CPU: each policy with kept memory, and the recipe. Raises: as `page`."""
    chosen = [result for result in _newest_on("cpu", folder) if result.workload in TRAINED]
    native, emulated = [one for one in chosen if not _emulates(one)], [one for one in chosen if _emulates(one)]
    low = f" where {emulated[0].plan['dtype']} is emulated, and fp32 alone is faster," if emulated else ""
    said = [(_cpus(native), _kept_beside_rivals(native)), (_cpus(emulated) + low, _kept_beside_rivals(emulated))]
    clauses = "; ".join(f"on {place} {own}" for place, own in said if own)
    beside_rivals = [f"{_models(chosen)}: {clauses}."] if clauses else []
    return " ".join([*beside_rivals, *_beside_fp32(chosen)]) or "No figures are stored yet."


def _models(results: Sequence[Result]) -> str:
    number = len({one.workload for one in results if any(m.variant == "prepare+keep" for m in one.measurements)})
    models = f"{number} models" if number > 1 else "a model"
    return f"With [memory kept](docs/memory.md), training steps of {models} beside the fastest eager rival as people run it, in geometric mean"


def _emulates(result: Result) -> bool:
    """Whether the machine multiplies what was trained in more slowly than fp32, which no ratio to a rival says."""
    rate = result.peak_rates.matmul
    return rate.get(result.plan.get("dtype", ""), math.inf) < rate.get("fp32", 0.0)


def _cpus(results: Sequence[Result]) -> str:
    number = len({machine_name(one) for one in results})
    return f"{number} {plural('CPU', number)}"


def _kept_beside_rivals(results: Sequence[Result]) -> str:
    """Return what each policy with kept memory comes to."""
    kept = {policy: _beside_rivals_unkept(results, f"{policy}+keep") for policy in POLICIES}
    return " and ".join(
        f"{statistics.geometric_mean(found):.2f}x the speed under `{_policy_name(results, policy)}` ({min(found):.2f}x to {max(found):.2f}x)"
        for policy, found in kept.items()
        if found
    )


def _beside_rivals_unkept(results: Sequence[Result], variant: str) -> list[float]:
    """Return how many times as fast a variant is as the fastest eager rival whose memory is not kept, in each result."""
    own = [(result, m) for result in results for m in result.measurements if m.variant == variant]
    compared = [compare(result, m, keeps=False, compiled=False) for result, m in own]
    return [one.ratio for one in compared if one is not None]


def _policy_name(results: Sequence[Result], policy: str) -> str:
    """Return what a table calls the policy of a variant that some of the results have, compiled, kept or neither."""
    one = next(m for result in results for m in result.measurements if m.variant.partition("+")[0] == policy)
    return label(one).removeprefix("prepare ").partition(",")[0]


def _beside_fp32(results: Sequence[Result]) -> list[str]:
    """Return a sentence about the first recipe in which masters were measured beside fp32, if there is one."""
    for result in results:
        own = result.at(points_of(result)[0])
        fp32, master = own.get("fp32"), own.get("prepare-master")
        if result.workload == "recipe" and fp32 is not None and fp32.peak_bytes > 0 and master is not None:
            time, memory = master.median / fp32.median, master.peak_bytes / fp32.peak_bytes
            name = label(master).removeprefix("prepare ")
            costs = f"{time:.2f}x of fp32's time and {memory:.2f}x of its memory"
            return [f"The published amp tutorial takes {costs} under `{name}`."]
    return []


def with_figures(text: str, folder: Path) -> str:
    """Return a page with the table of figures, and the sentence they come to, between their marks; a BenchError if those are missing, or as `page`."""
    return _placed(_placed(text, "figures", f"\n{summary(folder)}\n"), "speed", sentence(folder))


def _placed(text: str, name: str, content: str) -> str:
    """Return a page with other content between the two marks of a name."""
    begin, end = f"<!-- {name}: made by `python benchmarks/performance.py` -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise BenchError(f"the page has no place for the {name}; write {begin} and {end} where they belong.")
    return f"{before}{begin}{content}{end}{after}"


def main(words: Sequence[str] | None = None) -> int:
    """Write the page and the README. Returns: 0: done; 1: with --check, one of them is out of date. Raises: SystemExit: 2, a file that is none."""
    parser = argparse.ArgumentParser(
        prog="performance.py", description="Make the page of figures, and the README's, from stored results."
    )
    for option, default, what in (
        ("--results", RESULTS, "folder of the stored results"),
        ("--page", PAGE, "file to write"),
        ("--readme", README, "file whose figures are written"),
    ):
        parser.add_argument(option, type=Path, default=default, help=what)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    asked = parser.parse_args(words)
    try:
        made = {asked.page: page(asked.results, asked.page)}
        made[asked.readme] = with_figures(asked.readme.read_text(encoding="utf-8"), asked.results)
    except (MezzoError, OSError) as error:
        parser.error(str(error))
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale if asked.check else made:
        if asked.check:
            print(
                f"{path} is not what {asked.results} makes of it; run `python benchmarks/performance.py`.",
                file=sys.stderr,
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, made[path])
            print(path)
    return int(asked.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
