"""The fresh process in which one variant is built and timed: one JSON line in, one JSON line out.

The first line is the job. Each line after it is the label of the point to time once, and is answered by a sample.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch

from .. import keep_memory, prepare
from ..errors import BenchError, MezzoError, first_line
from ..formats import dtype_name
from ..train import peak_memory_bytes
from .roofline import measure_peak_rates, synchronize
from .variant import Variant, find_variant
from .workload import PEAK_RATES, Plan, Session, Setting, Workload, find_workload

RESET = Path("/proc/self/clear_refs")


def _return_freed_memory() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def load_code(device: torch.device, dtype: torch.dtype) -> None:
    """Touch the code of a training step, so that it counts as import and not as the workload's memory.

    The first optimizer step imports 70 MB of modules, the first products page in 10 MB of kernels (torch 2.13); a
    prepared step loads 7 MB of its own.
    """
    model = torch.nn.Linear(8, 8, device=device)
    batch = torch.ones(8, 8, device=device)
    for enabled in (False, True):
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            loss = torch.nn.functional.mse_loss(model(batch), batch)
        torch.autograd.backward(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    optimizer.step()
    amp = prepare(model, optimizer, f"{dtype_name(dtype)}-master")
    amp.zero_grad()
    amp.backward(torch.nn.functional.mse_loss(model(batch).float(), batch))
    amp.step()


class PeakMemory:
    """Watches the peak from its making on: allocated bytes on CUDA, the resident set elsewhere. Syncs: no."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _return_freed_memory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif RESET.exists():
            RESET.write_text("5")  # sets VmHWM back to VmRSS: man 5 proc
        self._before = peak_memory_bytes(device)

    def peak_bytes(self) -> int:
        """Return the most bytes held at once since the start, above those held at the start."""
        return peak_memory_bytes(self._device) - self._before


def seconds_of_rounds(session: Session, device: torch.device) -> Iterator[tuple[float, float]]:
    """Warm up once, then yield seconds and loss of one timed run each time it is asked. Syncs: yes."""
    session.warm_up()
    while True:
        gc.collect()
        synchronize(device)
        start = time.perf_counter()
        loss = session.run()
        synchronize(device)
        seconds = time.perf_counter() - start
        yield session.own_seconds() if session.own_seconds else seconds, loss.item()


class _BuiltPoint:
    """A variant at one point of a workload, built in memory, and warmed up by its first sample."""

    def __init__(self, label: str, workload: Workload, variant: Variant, setting: Setting) -> None:
        self.label = label
        workload.load()
        self._memory = PeakMemory(setting.device)
        self._session = workload.build(variant, setting)
        self._rounds = seconds_of_rounds(self._session, setting.device)
        self.is_resident = workload.is_resident(setting.device)

    def sample(self) -> dict[str, Any]:
        """Time one round, and return what there is to tell of it. Syncs: yes."""
        seconds, loss = next(self._rounds)
        return {
            "seconds": seconds,
            "loss": loss,
            "units": self._session.units,
            "peak_bytes": self._memory.peak_bytes(),
            "data_bytes": self._session.data_bytes,
            "measures": self._session.measures(),
        }


class VariantWorker:
    """Times one variant of a workload, point by point; holds one point in memory at a time.

    Raises: BenchError: a library the workload needs is missing.
    """

    def __init__(self, workload: Workload, variant: Variant, setting: Setting) -> None:
        self._variant, self._setting = variant, setting
        self._workloads = {point.label: point.workload for point in workload.points()}
        self._built: _BuiltPoint | None = None
        for module in (*workload.imports, *variant.imports):
            try:
                import_module(module)
            except ImportError:
                raise BenchError(f"this workload needs {module.split('.')[0]}; pip install 'mezzo[text]'.") from None
        load_code(setting.device, setting.dtype)

    def _drop(self) -> None:
        self._built = None
        _return_freed_memory()
        if self._setting.device.type == "cuda":
            torch.cuda.empty_cache()

    def sample(self, label: str) -> dict[str, Any]:
        """Return one sample of a point, built and warmed up on first use. Syncs: yes."""
        if self._built is None or self._built.label != label:
            self._drop()
            self._built = _BuiltPoint(label, self._workloads[label], self._variant, self._setting)
        answer = self._built.sample()
        if not self._built.is_resident:
            self._drop()
        return answer


def sampler_of(job: Mapping[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Return what takes a sample of a point as a job asks for it: of a variant, or of the machine's limits.

    Writes: torch's thread count and fp32 product precision; settings of the C library where freed memory is kept.
    """
    plan = Plan(**{**job["plan"], "variants": tuple(job["plan"]["variants"])})
    if plan.threads:
        torch.set_num_threads(plan.threads)
    if job["variant"] == PEAK_RATES:
        rates = partial(measure_peak_rates, plan.setting.device, plan.number_formats, plan.peak_rates_s)
        return lambda _: dataclasses.asdict(rates())
    variant = find_variant(job["variant"], plan.setting.device)
    if variant.keeps and variant.is_mezzo and not (kept := keep_memory()).is_kept:
        raise BenchError(f"memory cannot be kept here: {kept.why_not}. Leave the variants with +keep out.")
    set_tf32(variant.tf32)
    workload = find_workload(job["workload"]).from_fields(job["config"])
    return VariantWorker(workload, variant, plan.setting).sample


def set_tf32(is_on: bool) -> None:
    """Have fp32 products and convolutions run in TF32, or none: torch by itself lets convolutions alone. Writes: torch's settings."""
    torch.set_float32_matmul_precision("high" if is_on else "highest")
    torch.backends.cudnn.allow_tf32 = is_on


def _take_standard_output() -> TextIO:
    """Return the real standard output and point the process's own at standard error: libraries print."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def main() -> int:
    """Serve one job from standard input. Returns: 0 done, 1 after an error, which was answered as one sentence."""
    channel = _take_standard_output()

    def answer(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=channel, flush=True)

    try:
        sample = sampler_of(json.loads(sys.stdin.readline()))
        answer({"threads": torch.get_num_threads()})
        for line in sys.stdin:
            answer(sample(line.rstrip("\n")))
    except Exception as error:
        traceback.print_exc()
        said = str(error) if isinstance(error, MezzoError) else f"{type(error).__name__}: {first_line(error)}"
        answer({"error": said})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
