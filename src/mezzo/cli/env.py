"""`mezzo env`: what this machine computes natively, measured, and what follows from it."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bench import DeviceReport, advice, default_device, describe_machine, measure_device, parse_device
from ..errors import ConfigError, plural
from ..policy import Policy
from ..report import table_text
from .main import terminal_width


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvOptions:
    """Options of `mezzo env`.

    Attributes:
        device: cpu or cuda.
        budget_s: seconds to spend on measuring.
        json: print JSON instead of the table.
    """

    device: str = "cpu"
    budget_s: float = 4.0
    json: bool = False


def _facts(machine: dict[str, Any], auto: Policy) -> list[tuple[str, str]]:
    cpu, versions, threads = machine["cpu"], machine["versions"], machine["threads"]
    rows = [
        ("CPU", f"{cpu['model']}, {cpu['cores']} cores, {cpu['memory_bytes'] / 2**30:.0f} GiB"),
        ("16-bit flags", " ".join(flag for flag in cpu["flags"] if "16" in flag or "amx" in flag) or "none"),
        ("torch", f"{versions['torch']}, {threads} {plural('thread', threads)}, {cpu['torch_capability']} kernels"),
    ]
    if "gpu" in machine:
        gpu = machine["gpu"]
        rows.append(("GPU", f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB"))
    others = (f"{name} {version}" for name, version in versions.items() if name not in ("torch", "system"))
    return [*rows, ("versions", ", ".join(others)), ("policy auto", f"resolves to: {auto}")]


def _print(machine: dict[str, Any], report: DeviceReport, auto: Policy) -> None:
    (first, *rest), width = _facts(machine, auto), terminal_width()
    print(table_text(first, rest, width=width))
    rows = [
        (name, f"{one.flops_per_s / 1e9:.0f}", f"{one.times_fp32:.2f}x", "native" if one.reported else "no", one.reason)
        for name, one in report.formats.items()
    ]
    head = ("format", "GFLOP/s measured", "of fp32", "reported", "read from")
    print(f"\n{table_text(head, rows, right=(1, 2, 3), width=width)}\n")
    fold = textwrap.TextWrapper(width or sys.maxsize, subsequent_indent="  ", break_on_hyphens=False)
    for line in advice(report):
        print(fold.fill(f"- {line}"))


def run(argv: Sequence[str]) -> int:
    """Run `mezzo env` with the words after it. Returns: 0 done.

    Raises:
        ConfigError: no time to measure in, or no end of it.
        BenchError: a device that is not there.

    Syncs: yes.
    """
    import tyro

    options = tyro.cli(EnvOptions, prog="mezzo env", args=list(argv), default=EnvOptions(device=default_device()))
    if not options.budget_s > 0:
        raise ConfigError(f"--budget-s {options.budget_s} leaves no time to measure; write a positive number.")
    if options.budget_s == math.inf:
        raise ConfigError("--budget-s inf would never end; write a number of seconds.")
    device = parse_device(options.device)
    machine = describe_machine(device)
    report = measure_device(device, options.budget_s)
    auto = Policy.parse("auto").resolve(device)
    if options.json:
        measured = dataclasses.asdict(report)
        found = {"machine": machine, "measured": measured, "auto": str(auto), "advice": advice(report)}
        print(json.dumps(found, indent=1))
    else:
        _print(machine, report, auto)
    return 0
