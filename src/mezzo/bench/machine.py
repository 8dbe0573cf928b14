"""What a measurement was taken on: hardware, clocks, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..formats import memory_bytes

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_tile", "bf16", "fphp")
PACKAGES = ("torch", "triton", "transformers", "numpy", "accelerate", "lightning")
SETTINGS = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "KMP_", "MKL_", "ONEDNN_", "TORCHINDUCTOR_")
"""How the environment variables begin that a figure depends on."""
GPU_FACTS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "memory.total")


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _model() -> str:
    """Return the name of the processor; a name without a number, as rented machines have, with what tells its generation."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    kind = [f"{key.removeprefix('cpu ')} {_cpuinfo(key)}" for key in ("cpu family", "model") if _cpuinfo(key)]
    return name if any(map(str.isdigit, name)) or not kind else f"{name} ({', '.join(kind)})"


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(rf"^{key}\s*:\s*(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found.group(1).strip() if found else ""


def free_memory_bytes() -> int | None:
    """Return the bytes that new processes can have without taking pages from others; None where no one says."""
    path = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", path.read_text(), re.MULTILINE) if path.exists() else None
    return int(found.group(1)) * 1024 if found else None


def cpu() -> dict[str, Any]:
    """Return model, cores, memory, load and the flags that matter for 16 bit of this machine's CPU."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
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
    said = _said("nvidia-smi", f"--id={properties.uuid}", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader")
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
    head = _said("git", "-C", here, "rev-parse", "HEAD")
    edits = _said("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
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
