"""Peak memory of a process or a device above what it had when asked to watch."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

from .. import prepare
from ..formats import dtype_name

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


def _status_bytes(key: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _max_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _return_freed_memory() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def load_code(device: torch.device, dtype: torch.dtype) -> None:
    """Touch the code of a training step, so that it counts as import and not as the workload's memory.

    The first optimizer step imports 70 MB of modules, the first products page in 10 MB of kernels (torch 2.13); a
    prepared step loads 7 MB of its own.

    Args:
        device: where the workload will run.
        dtype: its 16-bit dtype.
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
    """Watches the peak from its making on: allocated bytes on CUDA, the resident set elsewhere.

    Args:
        device: where the workload runs.

    Syncs: no.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _return_freed_memory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif STATUS.exists():
            RESET.write_text("5")  # sets VmHWM back to VmRSS: man 5 proc
            self._before = _status_bytes("VmRSS")
        else:
            self._before = _max_resident_bytes()

    def peak_bytes(self) -> int:
        """Return the most bytes held at once since the start, above those held at the start."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _status_bytes("VmHWM") if STATUS.exists() else _max_resident_bytes()
        return peak - self._before
