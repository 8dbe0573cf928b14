"""Before and after: one workload by the code of two checkouts in turn, each in a process of its own.

Run: `python benchmarks/paired.py BEFORE AFTER WORKLOAD [--variants prepare-master] [--points LABEL] [--rounds 11] [--pairs 1] [--threads 2] [--quick]`

BEFORE and AFTER are folders of checkouts, or commits of this one. Both get the numbers of this checkout's workload, and every round swaps
who begins. Of equal processes one may be some percent slower all along: `--pairs` takes the rounds again with new ones. It prints one line
a point and variant: the median of the rounds' ratios, before over after, so that more than 1 is faster after; the middle half of the
ratios; and one line of JSON. A variant that has another name before is found by it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mezzo.bench import describe_machine, find_workload
from mezzo.bench.harness import WorkerProcess

ROOT = Path(__file__).parents[1]
FORMER_NAMES = {"prepare-master": "mezzo-prepared"}


@contextlib.contextmanager
def source_of(checkout: str) -> Iterator[Path]:
    """Yield the `src` of a folder, or of a commit unpacked into a folder that is gone afterwards."""
    if (Path(checkout) / "src" / "mezzo").is_dir():
        yield Path(checkout).resolve() / "src"
        return
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", checkout, "src"], capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory(prefix="mezzo-paired-") as folder:
        tarfile.open(fileobj=io.BytesIO(packed)).extractall(folder, filter="data")
        yield Path(folder) / "src"


def name_there(source: Path, variant: str) -> str:
    """Return what a checkout calls a variant."""
    known = f'"{variant}"' in (source / "mezzo" / "bench" / "variant.py").read_text(encoding="utf-8")
    return variant if known else FORMER_NAMES.get(variant, variant)


def paired(sources: Sequence[Path], job: dict[str, object], point: str, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of each round, before and after; the two take turns in beginning."""
    variant = str(job["variant"])
    with contextlib.ExitStack() as stack:
        workers = []
        for source in sources:
            there = name_there(source, variant)
            plan = {**dict(job["plan"]), "variants": [there]}  # type: ignore[call-overload]  # a mapping
            worker = WorkerProcess({**job, "variant": there, "plan": plan}, source=source)
            workers.append(stack.enter_context(worker))
        for worker in workers:
            worker.receive()
        for worker in workers:
            worker.ask(point)
        found = []
        for number in range(rounds):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            seconds = {index: float(workers[index].ask(point)["seconds"]) for index in order}
            found.append((seconds[0], seconds[1]))
    return found


def summary(seconds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the median ratio, before over after, with the quartiles, and the median seconds of both.

    >>> found = summary([(2.0, 1.0), (3.0, 1.0), (4.0, 1.0)])
    >>> found["ratio"], found["low"], found["high"]
    (3.0, 2.5, 3.5)
    """
    ratios = [before / after for before, after in seconds]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else ratios * 3
    before, after = (statistics.median(side) for side in zip(*seconds, strict=True))
    return {"ratio": middle, "low": low, "high": high, "before_s": before, "after_s": after}


def main() -> None:
    """Measure what was asked for, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("workload")
    parser.add_argument("--variants", nargs="+", default=["prepare-master"])
    parser.add_argument("--points", nargs="+", help="labels; all without it")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--pairs", type=int, default=1, help="pairs of new processes, each for all rounds")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    workload = find_workload(asked.workload).for_device(torch.device("cpu"))
    workload = workload.quick() if asked.quick else workload
    job = {
        "workload": asked.workload,
        "config": json.loads(json.dumps(dataclasses.asdict(workload))),
        "plan": {"threads": asked.threads},
    }
    known = [point.label for point in workload.points()]
    for point in asked.points or ():
        if point not in known:
            parser.error(f"--points {point}: {asked.workload} has no such point, but {', '.join(map(repr, known))}.")
    found = []
    with source_of(asked.before) as before, source_of(asked.after) as after:
        for point in asked.points or known:
            for variant in asked.variants:
                pairs = [
                    paired((before, after), {**job, "variant": variant}, point, asked.rounds)
                    for _ in range(asked.pairs)
                ]
                seconds = [both for pair in pairs for both in pair]
                row = summary(seconds)
                print(
                    f"{asked.workload} {point}, {variant}: {row['ratio']:.3f}x ({row['low']:.3f}-{row['high']:.3f}), "
                    f"{row['before_s']:.4f} s before, {row['after_s']:.4f} s after",
                    flush=True,
                )
                found.append({"point": point, "variant": variant, **row, "seconds": seconds})
    print(
        json.dumps(
            {
                "before": asked.before, "after": asked.after, "workload": asked.workload, "found": found,
                "machine": describe_machine(torch.device("cpu")),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
