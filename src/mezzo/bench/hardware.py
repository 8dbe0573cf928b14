"""What a measurement is taken on: hardware, clocks, versions, commit; and what its device multiplies fast, with the advice that follows."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import plural
from ..formats import NativeSupport, memory_bytes, native_support
from .roofline import FORMAT_NAMES, fastest_seconds, matmul_rate, product_rate, products_in

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_tile", "bf16", "fphp")
PACKAGES = ("torch", "triton", "transformers", "numpy", "accelerate", "lightning")
SETTINGS = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "KMP_", "MKL_", "ONEDNN_", "TORCHINDUCTOR_")
"""How the environment variables begin that a figure depends on."""
GPU_FACTS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "memory.total")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _model() -> str:
    """Return the name of the processor; a name without a number, as rented machines have, with what tells its generation."""
    name = _proc("model name") or platform.processor() or platform.machine()
    kind = [f"{key.removeprefix('cpu ')} {_proc(key)}" for key in ("cpu family", "model") if _proc(key)]
    return name if any(map(str.isdigit, name)) or not kind else f"{name} ({', '.join(kind)})"


def _proc(key: str, file: str = "cpuinfo") -> str:
    """Return what Linux says of a key in a file of /proc; empty where it says nothing."""
    path = Path("/proc", file)
    found = re.search(rf"^{key}\s*:\s*(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found.group(1).strip() if found else ""


def free_memory_bytes() -> int | None:
    """Return the bytes that new processes can have without taking pages from others; None where no one says."""
    available = _proc("MemAvailable", "meminfo").removesuffix(" kB")
    return int(available) * 1024 if available else None


def cpu() -> dict[str, Any]:
    """Return model, cores, memory, load and the flags that matter for 16 bit of this machine's CPU."""
    flags = set((_proc("flags") or _proc("Features")).split())
    return {
        "model": _model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "load_before": os.getloadavg()[0],
    }


def gpu(device: torch.device) -> dict[str, Any]:
    """Return name, capability, memory and, where nvidia-smi answers, driver, clocks and power limit of a GPU."""
    index = device.index or 0
    properties = torch.cuda.get_device_properties(index)
    query = f"--query-gpu={','.join(GPU_FACTS)}"
    said = _output("nvidia-smi", f"--id={properties.uuid}", query, "--format=csv,noheader")
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "nvidia_smi": dict(zip(GPU_FACTS, (fact.strip() for fact in said.split(",")), strict=False)) if said else {},
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of every installed package that a figure depends on."""
    from .. import __version__

    found = {"python": platform.python_version(), "mezzo": __version__, "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = str(torch.__version__) if name == "torch" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """Return the commit of the checkout this package runs from, "+edits" if it was changed; empty outside of one."""
    here = str(Path(__file__).parent)
    head = _output("git", "-C", here, "rev-parse", "HEAD")
    edits = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return f"{head[:12]}+edits" if head and edits else head[:12]


def settings() -> dict[str, str]:
    """Return the environment variables that are set and a figure depends on: allocator, threads, libraries put before."""
    names = [name for name in os.environ if name.startswith(SETTINGS)]
    return {name: os.environ[name] for name in sorted(names)}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return everything about the machine that a figure depends on, as plain JSON values; starts CUDA for a CUDA device. Syncs: no."""
    facts: dict[str, Any] = {"device": device.type, "cpu": cpu(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts["gpu"] = gpu(device)
    return {**facts, "settings": settings(), "versions": versions(), "commit": commit()}


def short_name(machine: dict[str, Any]) -> str:
    """Return a name for file names: the GPU, or the CPU with its threads.

    >>> short_name({"device": "cpu", "cpu": {"model": "AMD EPYC 9B45 (Zen 5)"}, "threads": 2})
    'amd-epyc-9b45-zen-5-2t'
    """
    is_cuda = machine["device"] == "cuda"
    full = machine["gpu"]["name"] if is_cuda else f"{machine['cpu']['model']} {machine['threads']}t"
    return re.sub(r"[^a-z0-9]+", "-", full.lower()).strip("-")


Probe = TypeVar("Probe")
# The width whose products a device runs near its best rate, and the rows to find out from where on.
PROBE_WIDTH = {"cpu": 1024, "cuda": 4096}
PROBE_ROWS = {"cpu": (1, 8, 64, 512), "cuda": (8, 64, 512, 4096)}
PASSES = 3
SATURATED = 0.8
"""Share of the best rate from which on a device counts as busy."""
UNEVEN_COSTS = 0.95
"""Share of the even width's rate below which an uneven width counts as slower."""
FRESH_BYTES = 2**26
"""More than glibc keeps by itself: it maps blocks of 32 MiB and more anew each time."""
FRESH_COSTS = 0.8
"""Share of the rate of kept memory below which fresh memory counts as slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatReport:
    """One number format on a device: the measured rate of large square products, and that over the rate of fp32.

    `reported` is whether the device says that it has units for it, `reason` where that was read.
    """

    flops_per_s: float
    reported: bool
    reason: str
    times_fp32: float

    @property
    def disagrees(self) -> bool:
        """Whether a 16-bit format reported as native is no faster than fp32, or the reverse."""
        return self.reported != (self.times_fp32 > 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """What was measured on a device.

    Attributes:
        formats: by name; fp32 always, 16-bit formats, tf32 on CUDA.
        fastest: the 16-bit format with the highest rate.
        even_width: a width that is a multiple of 8.
        uneven_share: rate of products one narrower, over that of `even_width`, in `fastest`.
        share_by_rows: rate at a number of rows over the best rate seen, in `fastest`.
        fresh_share: rate of writing memory that was freed and taken again, over that of memory that was kept; 1 where
            the allocator keeps it anyway, as PyTorch's for CUDA does.
    """

    device: str
    formats: dict[str, FormatReport]
    fastest: str
    even_width: int
    uneven_share: float
    share_by_rows: dict[int, float]
    fresh_share: float = 1.0


def _reported(device: torch.device, name: str) -> NativeSupport:
    if name == "tf32":  # Source: NVIDIA A100 architecture whitepaper.
        capability = torch.cuda.get_device_capability(device)
        return NativeSupport(native=capability >= (8, 0), reason=f"compute capability {capability[0]}.{capability[1]}")
    with products_in(name) as dtype:
        return native_support(device, dtype)


def _best_of(rate: Callable[[Probe], float], probes: Sequence[Probe]) -> dict[Probe, float]:
    """Return the best rate of each probe over interleaved passes: a busy moment does not fall on one of them alone."""
    passes = [{probe: rate(probe) for probe in probes} for _ in range(PASSES)]
    return {probe: max(found[probe] for found in passes) for probe in probes}


def fresh_share(device: torch.device, budget_s: float) -> float:
    """Return how fast freed memory is written when it is taken again, over memory that was kept. Syncs: yes."""

    def write() -> Tensor:
        return torch.empty(FRESH_BYTES, dtype=torch.uint8, device=device).fill_(1)

    held = write()
    kept_s = fastest_seconds(lambda: held.fill_(1), device, budget_s / 2)
    return min(1.0, kept_s / fastest_seconds(write, device, budget_s / 2))


def measure_device(device: torch.device, budget_s: float) -> DeviceReport:
    """Measure the products of every format, an uneven width, and growing batches, within a budget of roughly so many seconds in all. Syncs: yes."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    names = tuple(dict.fromkeys((*FORMAT_NAMES[kind], "fp16")))
    rows, width = PROBE_ROWS[kind], PROBE_WIDTH[kind]
    part_s = budget_s / PASSES / 2
    rates = _best_of(lambda name: matmul_rate(name, device, part_s / len(names)), names)
    fastest = max(("bf16", "fp16"), key=lambda name: rates[name])
    shapes = (*((n, width) for n in rows), (width, width), (width, width - 1))
    probes = _best_of(lambda shape: product_rate(*shape, fastest, device, part_s / len(shapes)), shapes)
    even, uneven = probes[width, width], probes[width, width - 1]
    best = max(rates[fastest], *probes.values())
    support = {name: _reported(device, name) for name in names}
    return DeviceReport(
        device=device.type,
        formats={
            name: FormatReport(
                flops_per_s=rates[name],
                reported=support[name].native,
                reason=support[name].reason,
                times_fp32=rates[name] / rates["fp32"],
            )
            for name in names
        },
        fastest=fastest,
        even_width=width,
        uneven_share=uneven / even,
        share_by_rows={n: probes[n, width] / best for n in rows},
        fresh_share=fresh_share(device, part_s) if kind == "cpu" else 1.0,
    )


def _format_advice(formats: Mapping[str, FormatReport], fastest: str) -> list[str]:
    best = formats[fastest]
    lines = []
    if best.times_fp32 > 1.0:
        lines.append(
            f"{fastest} products run at {best.times_fp32:.1f}x the rate of fp32: this device has fast 16-bit units, and mixed precision pays where large products dominate."
        )
    else:
        lines.append(
            f"no 16-bit format multiplies faster than fp32 here ({fastest} {best.times_fp32:.2f}x): 16 bit saves memory on this device, not time; write policy fp32 unless memory is short."
        )
    lines += [
        f"{name} products run at {report.times_fp32:.2f}x the rate of fp32; prefer {fastest} on this device."
        for name, report in formats.items()
        if name not in ("fp32", fastest) and report.times_fp32 <= 1.0 < best.times_fp32
    ]
    lines += [
        f"{name} is reported as {'native' if report.reported else 'not native'} ({report.reason}) but measured at "
        f"{report.times_fp32:.2f}x fp32: trust the measurement, taken while the machine is idle."
        for name, report in formats.items()
        if name != "fp32" and report.disagrees
    ]
    return lines


def advice(report: DeviceReport) -> tuple[str, ...]:
    """Return what the measurements advise, one sentence each: formats, widths, batch sizes, memory."""
    lines = _format_advice(report.formats, report.fastest)
    narrow, share = report.even_width - 1, report.uneven_share
    pays = share < UNEVEN_COSTS
    lines.append(
        f"width {narrow} runs at {share:.0%} of the rate of width {report.even_width}: "
        + ("make widths multiples of 8." if pays else "widths that are no multiples of 8 cost little on this device.")
    )
    busy = [rows for rows, of_best in report.share_by_rows.items() if of_best >= SATURATED]
    smallest, least = next(iter(report.share_by_rows.items()))
    small = f"{smallest} {plural('row', smallest)} {'reaches' if smallest == 1 else 'reach'} {least:.1%}"
    if busy:
        lines.append(
            f"{busy[0]} rows at width {report.even_width} reach {report.share_by_rows[busy[0]]:.0%} of the best "
            f"{report.fastest} rate, {small}: below that, moving weights and launching work cost more than the products."
        )
    else:
        most = max(report.share_by_rows)
        lines.append(
            f"even {most} rows at width {report.even_width} reach only {report.share_by_rows[most]:.0%} of the best "
            f"{report.fastest} rate, {small}: larger batches and widths use this device better."
        )
    if report.fresh_share < FRESH_COSTS:
        lines.append(
            f"memory that was freed and taken again is written at {report.fresh_share:.0%} of the rate of memory that was "
            "kept, and every step frees its activations and gradients: on Linux, call mezzo.keep_memory() once, or "
            "start with MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4294967296 in the environment, and glibc keeps it."
        )
    return tuple(lines)
