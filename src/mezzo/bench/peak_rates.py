"""Measures what a device can do at best: matrix products in each format, and moving memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..formats import parse_dtype
from .roofline import PeakRates

# On the CPU the smallest is a cache-resident product; 4096 and above take seconds in fp32 on two cores.
MATMUL_WIDTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192)}
STREAM_BYTES = {"cpu": (2**20, 2**23, 2**28), "cuda": (2**24, 2**26, 2**30)}
FORMAT_NAMES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "fp16", "bf16")}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given. Syncs: yes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest_seconds(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the least time one call took, after one unmeasured call, within a time budget; at least one is measured.

    Syncs: yes.
    """
    call()
    synchronize(device)
    best, deadline = float("inf"), time.perf_counter() + budget_s
    while True:
        start = time.perf_counter()
        call()
        synchronize(device)
        end = time.perf_counter()
        best = min(best, end - start)
        if end >= deadline:
            return best


@contextmanager
def products_in(number_format: str) -> Iterator[torch.dtype]:
    """Let fp32 products run as tf32 inside, if that is the format; yields the dtype the operands have."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if number_format == "tf32" else "highest")
    try:
        yield torch.float32 if number_format == "tf32" else parse_dtype(number_format)
    finally:
        torch.set_float32_matmul_precision(before)


def product_rate(rows: int, width: int, number_format: str, device: torch.device, budget_s: float) -> float:
    """Return floating-point operations per second of `[rows, width] @ [width, width]`, the layout of a linear layer.

    Args:
        rows: rows of the left operand.
        width: contracted and output features.
        number_format: fp32, tf32, fp16 or bf16.
        device: where to measure.
        budget_s: seconds to spend, two calls at least.

    Syncs: yes.
    """
    with products_in(number_format) as dtype:
        x = torch.randn(rows, width, device=device).to(dtype)
        weight = torch.randn(width, width, device=device).to(dtype)
        seconds = fastest_seconds(lambda: torch.nn.functional.linear(x, weight), device, budget_s)
    return 2.0 * rows * width * width / seconds


def matmul_rate(number_format: str, device: torch.device, budget_s: float) -> float:
    """Return the best rate of large square products, floating-point operations per second.

    The widths grow until one of them would not end in time: an emulated format is slow.

    Syncs: yes.
    """
    best = 0.0
    widths = MATMUL_WIDTHS["cuda" if device.type == "cuda" else "cpu"]
    for width in widths:
        if best and 2 * 2.0 * width**3 / best > budget_s:
            break
        best = max(best, product_rate(width, width, number_format, device, budget_s / len(widths)))
    return best


def stream_rate(array_bytes: int, device: torch.device, budget_s: float) -> float:
    """Return bytes per second read and written: the faster of copying an array and of summing it.

    Syncs: yes.
    """
    source = torch.ones(array_bytes // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> Tensor:
        return target.copy_(source)

    copying = 2 * array_bytes / fastest_seconds(copy, device, budget_s / 2)
    return max(copying, array_bytes / fastest_seconds(source.sum, device, budget_s / 2))


def measure_peak_rates(device: torch.device, number_formats: tuple[str, ...], budget_s: float) -> PeakRates:
    """Return the best rates seen within a time budget that is shared by all of them.

    Args:
        device: where to measure.
        number_formats: formats to multiply in.
        budget_s: seconds in all, roughly.

    Syncs: yes.
    """
    sizes = STREAM_BYTES["cuda" if device.type == "cuda" else "cpu"]
    share_s = budget_s / (len(number_formats) + 1)
    return PeakRates(
        matmul={name: matmul_rate(name, device, share_s) for name in number_formats},
        stream={size: stream_rate(size, device, share_s / len(sizes)) for size in sizes},
    )
