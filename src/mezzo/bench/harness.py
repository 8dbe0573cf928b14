"""Times variants side by side: each in a process of its own, the rounds interleaved, every sample kept."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from importlib import util
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import BenchError
from .hardware import describe_machine, free_memory_bytes
from .measurement import Measurement, PointRoofline, Result
from .roofline import PeakRates
from .variant import VARIANTS, find_variant
from .workload import PEAK_RATES, WORKLOADS, Plan, Point, Workload

Progress = Callable[[str, int, int], None]
"""Told what is timed next, how many samples there are and how many there will be."""
KEEP_BY_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""How glibc keeps freed memory for programs that do not call `mezzo.keep_memory()`."""


def environment_of(variant: str, source: Path | None = None) -> dict[str, str]:
    """Return the environment of a variant's process; `source` is the `src` of another checkout, whose code is to run."""
    found = VARIANTS.get(variant)
    keeps = found is not None and found.keeps and not found.is_mezzo
    return os.environ | (KEEP_BY_ENVIRONMENT if keeps else {}) | ({"PYTHONPATH": str(source)} if source else {})


def schedule(points: Sequence[str], variants: Sequence[str], rounds: int) -> Iterator[tuple[str, int, str]]:
    """Return (point, round, variant) in the order of timing: A B C, A B C, ... at each point in turn.

    Interleaving lets a machine that grows slower or faster meanwhile do so for every variant alike.
    """
    return product(points, range(rounds), variants)


class WorkerProcess(contextlib.AbstractContextManager["WorkerProcess"]):
    """A fresh Python process that serves one variant; ended on leaving the context, busy or not.

    Args:
        job: what `mezzo.bench.worker` is to serve.
        talks: its standard error is this process's own; otherwise it goes to a log that is kept after an error.
        source: as in `environment_of`.

    Raises: BenchError: from `ask`, if the process reports an error or dies.
    """

    def __init__(self, job: Mapping[str, Any], *, talks: bool = False, source: Path | None = None) -> None:
        self.variant: str = job["variant"]
        prefix = f"mezzo-bench-{self.variant}-"
        self._file = tempfile.NamedTemporaryFile("w+", prefix=prefix, suffix=".log", delete=False)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mezzo.bench.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if talks else self._file, text=True,
            env=environment_of(self.variant, source),
        )  # fmt: skip
        self.pid, self.log = self._process.pid, Path(self._file.name)
        self._talks = talks
        self._failed = False
        self.send(json.dumps(job))

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self.exit_code: int = self._process.returncode
        self._file.close()
        if self._talks or not self._failed:
            self.log.unlink()

    def send(self, line: str) -> None:
        """Give the process a line; a process that has died is found out by `ask`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next answer. Raises: BenchError: it is an error, or there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._cause_of_death()}
        if "error" in answer:
            self._failed = True
            log = "" if self._talks else f" (full log: {self.log})"
            raise BenchError(f"variant {self.variant} failed: {answer['error']}{log}")
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and return its answer."""
        self.send(line)
        return self.receive()

    def _cause_of_death(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "the process was killed, as the system does when memory runs out; write a smaller size."
        return f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}."


def _measurement(point: str, variant: str, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> Measurement:
    last = samples[-1]
    setting = plan.setting
    return Measurement(
        point=point,
        variant=variant,
        number_format=find_variant(variant, setting.device).number_format(setting.dtype),
        seconds=tuple(sample["seconds"] for sample in samples),
        units=last["units"],
        loss=last["loss"],
        peak_bytes=max(sample["peak_bytes"] for sample in samples),
        data_bytes=last["data_bytes"],
        measures=last["measures"],
    )


def _roofline(point: Point, plan: Plan) -> PointRoofline:
    phases = {name: point.workload.roofline(name) for name in plan.number_formats}
    return PointRoofline(axis=point.axis, value=point.value, phases={k: v for k, v in phases.items() if v})


def name_of(workload: Workload) -> str:
    """Return the name a workload has on the command line."""
    return next(name for name, (kind, _) in WORKLOADS.items() if kind.rpartition(".")[2] == type(workload).__name__)


def checked_points(workload: Workload, plan: Plan) -> tuple[Point, ...]:
    """Return the points at which a plan measures a workload.

    Raises: BenchError: numbers that leave nothing to measure, or a variant that cannot do what is timed at one of the points.
    """
    workload.check()
    points = workload.points()
    for point in points:
        for name in plan.variants:
            why_not = point.workload.why_not(find_variant(name, plan.setting.device))
            if why_not:
                raise BenchError(f"variant {name} does not run in {name_of(point.workload)}, {point.label}: {why_not}.")
    return points


def check_memory(variant: str, peaks: Sequence[int], free: int | None) -> None:
    """Refuse with a BenchError one more variant beside others where fewer bytes are free than the most that one of them took."""
    if peaks and free is not None and free < max(peaks):
        raise BenchError(
            f"{free / 2**30:.1f} GiB of memory are left for variant {variant} beside {len(peaks)} others, one of which takes "
            f"{max(peaks) / 2**30:.1f}: name fewer with --variants, or write a smaller size."
        )


def measure(workload: Workload, plan: Plan, *, tests: str = "not run", progress: Progress | None = None) -> Result:
    """Time every variant of a plan on every point of a workload.

    Each variant has a process of its own that warms up once a point; each round times every variant once, and the
    machine's limits with them. `tests` is what the tests of the timed code said; `progress` is called before each sample.

    Raises:
        BenchError: the workload's numbers leave nothing to measure, a variant cannot do it, memory does not hold them
            all, or a variant failed; the message names it and the log of its process.

    Syncs: yes.
    """
    points = checked_points(workload, plan)
    order = list(schedule([point.label for point in points], (*plan.variants, PEAK_RATES), plan.rounds))
    device = plan.setting.device
    crowded = {point.label for point in points if device.type == "cpu" and point.workload.is_resident(device)}
    config = json.loads(json.dumps(dataclasses.asdict(workload)))
    job = {"workload": name_of(workload), "config": config, "plan": dataclasses.asdict(plan)}
    machine = describe_machine(device)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        # They start side by side, untimed; nothing runs beside a sample.
        workers = {
            name: stack.enter_context(WorkerProcess({**job, "variant": name}, talks=workload.talks))
            for name in (*plan.variants, PEAK_RATES)
        }
        threads = [worker.receive()["threads"] for worker in workers.values()]
        for done, (point, number, variant) in enumerate(order):
            if progress:
                progress(f"{point}: {variant}", done, len(order))
            if number == 0 and point in crowded and variant != PEAK_RATES:
                peaks = [found[0]["peak_bytes"] for (at, _), found in samples.items() if at == point]
                check_memory(variant, peaks, free_memory_bytes())
            samples.setdefault((point, variant), []).append(workers[variant].ask(point))
    limits = [PeakRates.from_plain(s) for point in points for s in samples.pop((point.label, PEAK_RATES))]
    return Result(
        workload=name_of(workload),
        unit=workload.unit,
        date=date,
        tests=tests,
        plan=json.loads(json.dumps(dataclasses.asdict(plan))),
        config=config,
        machine={**machine, "threads": threads[0]},
        peak_rates=reduce(PeakRates.best, limits),
        rooflines={point.label: _roofline(point, plan) for point in points},
        measurements=tuple(_measurement(point, variant, plan, found) for (point, variant), found in samples.items()),
    )


def checkout() -> Path | None:
    """Return the root of the checkout this package runs from, or None if it is installed without its tests."""
    root = Path(__file__).parents[3]
    return root if (root / "pyproject.toml").exists() and (root / "tests").is_dir() else None


def run_tests(paths: Sequence[str], root: Path | None = None) -> str:
    """Run test paths of a checkout, by default the one of this package, in a fresh process; return what pytest said in a line, or why it did not run.

    A test that fails, or a path that does not exist, is a BenchError.
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
            f"the tests of what would be timed do not pass ({last.strip('= ')}); fix them, or time it all the same with --no-check. They are: pytest {' '.join(paths)}"
        )
    return last.strip("= ")
