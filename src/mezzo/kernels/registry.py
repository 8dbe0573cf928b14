"""Which implementation of a step's arithmetic runs, decided per call from op, device and dtype, and why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import platform
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import torch

from .._torch import fused_devices, has_fast_kernels, has_foreach_norm, without_dispatch_modes
from ..errors import ConfigError, did_you_mean
from ..formats import MIXED_DTYPES, dtype_name, native_support
from .backends.cpp.build import NativeBuildError, library
from .backends.cpp.targets import OPS

Backend = Literal["auto", "reference", "cpu", "foreach", "triton", "fused"]
"""auto picks the fastest that can run here; any other name is that one or an error."""

# Fastest first; the reference, which is what the folder of an op defines or torch's own op, runs everywhere and ends every list.
_ORDER: dict[str, tuple[str, ...]] = {
    "gradients": ("cpu", "foreach", "reference"),
    "adamw": ("cpu", "triton", "fused", "reference"),
    "sgd": ("cpu", "triton", "fused", "reference"),
    **dict.fromkeys(
        ("linear", "linear_training", "attention", "recurrent", "convolution", "dropout"), ("cpu", "reference")
    ),
    "decision": ("triton", "reference"),
    "layer_norm": ("triton", "cpu", "reference"),
}
_CPU = torch.device("cpu")
_log = logging.getLogger("mezzo.kernels")
_warned: list[str] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The implementation that runs, the module that holds it, and what decided: one clause for a report."""

    backend: str
    reason: str
    module: ModuleType


def _obstacle(backend: str, op: str, device: torch.device, dtype: torch.dtype) -> str:
    """Say why a backend cannot run an op here; empty if it can."""
    if backend not in _ORDER[op]:
        return f"{op} has no {backend} implementation"
    if backend == "reference":
        return ""
    if dtype not in MIXED_DTYPES:
        return f"it does not compute in {dtype_name(dtype)}"
    if backend in ("fused", "foreach"):
        has_it = has_foreach_norm(device) if backend == "foreach" else device.type in fused_devices()
        return "" if has_it and device.type != "cpu" else f"torch has none for {device.type.upper()}"
    needed = "cpu" if backend == "cpu" else "cuda"
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != needed and not interpreted:
        return f"it is for {needed.upper()}"
    return _missing(backend, op, device)


@without_dispatch_modes()
def _missing(backend: str, op: str, device: torch.device) -> str:
    """Say what a backend lacks on this machine; empty if nothing."""
    if backend == "triton":
        where = torch.device(device.type, device.index or 0)
        return _triton_fails(where) if importlib.util.find_spec("triton") else "triton is not installed"
    if backend == "cpu":
        try:
            library(OPS / op / "cpu.cpp")
        except NativeBuildError as error:
            return _warned_reason(error)
    return ""


def _warned_reason(error: NativeBuildError) -> str:
    """Return why there is no compiled kernel, after a warning, once in a process: plain torch is several times slower."""
    if not _warned:
        _warned.append(str(error))
        _log.warning(
            "optimizer steps, gradient checks, gradients of attention and convolutions, recurrent layers, RMS norms, dropout and linear layers on the CPU run in plain torch, not in compiled kernels: %s. %s",
            error,
            error.remedy,
        )
    return str(error)


@functools.cache
def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies a 16-bit dtype by emulation alone, several times slower than fp32. Host only."""
    if native_support("cpu", dtype).native:
        return False
    is_x86 = platform.machine().casefold() in ("x86_64", "amd64")
    return (is_x86 and dtype is torch.bfloat16) or not has_fast_kernels(dtype)  # oneDNN emulates bf16 on every AVX-512


@functools.cache
def _triton_fails(device: torch.device) -> str:
    """Say why Triton's kernels do not run on a device, after a warning; empty if one that does nothing ran."""
    try:
        importlib.import_module(".backends.triton.tiles", __package__).probe(device)
    except Exception as error:  # of the driver, of a compiler that is not there, of a GPU that is too old
        reason = f"Triton fails here with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        _log.warning(
            "optimizer steps, decisions and layer norms on %s run in plain torch, which launches several times as much: %s. "
            "Install a C compiler, or another version of Triton.",
            device,
            reason,
        )
        return reason
    return ""


@functools.cache
def choose(op: str, device: torch.device, dtype: torch.dtype, backend: Backend = "auto") -> Choice:
    """Return which implementation of an op runs for a device and the dtype of weights, or of the gradients for op "gradients"; decided once.

    While torch.compile traces, callers take the reference instead, of which the compiler makes a kernel itself.

    Raises: ConfigError: the backend does not exist, or cannot run here and was asked for by name. Syncs: no.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"unknown backend {backend!r}.{did_you_mean(backend, get_args(Backend))}")
    refused: list[str] = []
    for name in _ORDER[op] if backend == "auto" else (backend,):
        obstacle = _obstacle(name, op, device, dtype)
        if not obstacle:
            reason = "; ".join(refused) or ("asked for" if backend == name else "the fastest that can run here")
            _log.debug("%s on %s %s runs the %s kernel: %s", op, device.type, dtype_name(dtype), name, reason)
            module = importlib.import_module(f".ops.{op}" if name == "reference" else f".ops.{op}.{name}", __package__)
            return Choice(backend=name, reason=reason, module=module)
        refused.append(f"not {name}: {obstacle}")
    raise ConfigError(
        f"backend={backend!r} was asked for {op} on {device.type} {dtype_name(dtype)}: {obstacle}. Write backend='auto'."
    )


def compiled(op: str) -> Any:
    """Return the module of an op's compiled kernel for bf16 on the CPU; None where torch's own op runs. Host only."""
    choice = choose(op, _CPU, torch.bfloat16)
    return choice.module if choice.backend == "cpu" else None


def why(op: str, device: torch.device, dtype: torch.dtype, backend: Backend = "auto") -> str:
    """Return one line that names the implementation and what decided; arguments and errors are those of `choose`.

    >>> why("gradients", torch.device("meta"), torch.bfloat16)
    'gradients on meta bf16: reference, not cpu: it is for CPU; not foreach: torch has none for META'
    """
    choice = choose(op, device, dtype, backend)
    return f"{op} on {device.type} {dtype_name(dtype)}: {choice.backend}, {choice.reason}"
