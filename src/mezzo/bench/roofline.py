"""The least time a machine can take: operations and bytes over the best rates measured on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ..errors import BenchError
from ..formats import parse_dtype

# On the CPU the smallest is a cache-resident product; 4096 and above take seconds in fp32 on two cores.
MATMUL_WIDTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192)}
# A set counts as fast as the best rate at the size below it, so the sizes lie close enough that what no cache holds is not
# held to a cache's rate.
STREAM_BYTES = {"cpu": (2**20, 2**23, 2**26, 2**27, 15 * 2**24), "cuda": (2**24, 2**26, 15 * 2**24, 2**30)}
FORMAT_NAMES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "fp16", "bf16")}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRates:
    """What this machine was measured to do, in the same run as what is held against it.

    Attributes:
        matmul: floating-point operations per second of the best large matrix product, by format name.
        stream: bytes read and written per second, by how many are moved; from within the caches to well beyond.
    """

    matmul: dict[str, float]
    stream: dict[int, float]

    @classmethod
    def from_plain(cls, stored: Mapping[str, Any]) -> PeakRates:
        """Return the rates that went through JSON, whose keys are words."""
        return cls(matmul=stored["matmul"], stream={int(size): rate for size, rate in stored["stream"].items()})

    def bandwidth(self, moved_bytes: float) -> float:
        """Return the bytes per second that nothing of this size can beat.

        A set that fits a cache moves faster than memory does, so the rate is the best one measured at this size
        or above it.
        """
        at = max((size for size in self.stream if size <= moved_bytes), default=min(self.stream))
        return max(rate for size, rate in self.stream.items() if size >= at)

    def products(self, number_format: str) -> float:
        """Return the floating-point operations per second of products that nothing beats: 16-bit operands may be widened, where that is faster."""
        wider = ("fp32",) if number_format in ("bf16", "fp16") else ()
        return max(self.matmul.get(name, 0.0) for name in (number_format, *wider))

    def best(self, other: PeakRates) -> PeakRates:
        """Return the higher of two measurements of the same machine, rate by rate."""
        return PeakRates(
            matmul={name: max(rate, other.matmul.get(name, 0.0)) for name, rate in self.matmul.items()},
            stream={size: max(rate, other.stream.get(size, 0.0)) for size, rate in self.stream.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a workload that must end before the next can: operations in matrix products, and bytes read or written at least once."""

    name: str
    flops: float = 0.0
    moved_bytes: float = 0.0

    def seconds(self, peak_rates: PeakRates, number_format: str) -> float:
        """Return the least time of this phase with products in a format. Raises: BenchError: the format's rate was not measured."""
        if self.flops and number_format not in peak_rates.matmul:
            raise BenchError(
                f"the roofline of '{self.name}' needs the matmul rate of {number_format}, but only "
                f"{', '.join(peak_rates.matmul)} were measured; add {number_format} to the peak rates of this run."
            )
        computing = self.flops / peak_rates.products(number_format) if self.flops else 0.0
        moving = self.moved_bytes / peak_rates.bandwidth(self.moved_bytes) if self.moved_bytes else 0.0
        return max(computing, moving)


def bytes_stored(number_format: str) -> int:
    """Return the bytes of a number in a format: tf32 is one of products alone."""
    return 4 if number_format in ("fp32", "tf32") else 2


def adamw_phase(number_format: str, count: float) -> Phase:
    """Return the least work of AdamW for so many weights: it reads gradient, weight and two moments, and writes the last three.

    fp32: 28 bytes a weight. 16 bit: a gradient of 2 bytes, and a master of 4 that is weight and remainder: 26.
    """
    return Phase(name="update", moved_bytes=(bytes_stored(number_format) + 24) * count)


def roofline_seconds(phases: Sequence[Phase], peak_rates: PeakRates, number_format: str) -> float:
    """Return the least time of phases that follow each other: in each, computing and moving may overlap.

    Source: Williams et al. 2009, the roofline model, applied phase by phase.
    """
    return sum(phase.seconds(peak_rates, number_format) for phase in phases)


class _Unpadded(TorchFunctionMode):
    """Answers yes where a model asks about values that the meta device has not: no batch here is padded or packed."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        return True if func is Tensor.__bool__ else func(*args, **(kwargs or {}))


def count_flops(loss_of: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the floating-point operations of the products in a forward and in its backward, as torch counts them.

    `loss_of` is the forward, of tensors on the meta device: nothing is computed. Syncs: no.
    """
    # The counter knows no fused attention kernel of the CPU.
    with _Unpadded(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = loss_of()
        forward = counter.get_total_flops()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    return float(forward), float(counter.get_total_flops() - forward)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given. Syncs: yes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest_seconds(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the least time one call took, after one unmeasured call, within a time budget; at least one is measured. Syncs: yes."""
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

    Products run in fp32, tf32, fp16 or bf16, for `budget_s` seconds, two calls at least. Syncs: yes.
    """
    with products_in(number_format) as dtype:
        x = torch.randn(rows, width, device=device).to(dtype)
        weight = torch.randn(width, width, device=device).to(dtype)
        seconds = fastest_seconds(lambda: torch.nn.functional.linear(x, weight), device, budget_s)
    return 2.0 * rows * width * width / seconds


def matmul_rate(number_format: str, device: torch.device, budget_s: float) -> float:
    """Return the best rate of large square products, floating-point operations per second.

    The widths grow until one of them would not end in time: an emulated format is slow. Syncs: yes.
    """
    best = 0.0
    widths = MATMUL_WIDTHS["cuda" if device.type == "cuda" else "cpu"]
    for width in widths:
        if best and 2 * 2.0 * width**3 / best > budget_s:
            break
        best = max(best, product_rate(width, width, number_format, device, budget_s / len(widths)))
    return best


def stream_rate(moved_bytes: int, device: torch.device, budget_s: float) -> float:
    """Return bytes per second read and written: the best of summing an array, copying half of it over the rest, and negating half.

    A copy on a CPU reads its target too, which nobody counts; what is changed in place is read and written once each. Each way
    moves as many bytes as the array has, two calls at least of each within `budget_s` seconds. Syncs: yes.
    """
    array = torch.zeros(moved_bytes // 4, device=device)
    source, target = array.chunk(2)
    ways = (array.sum, lambda: target.copy_(source), target.neg_)
    return moved_bytes / min([fastest_seconds(way, device, budget_s / len(ways)) for way in ways])


def measure_peak_rates(device: torch.device, number_formats: tuple[str, ...], budget_s: float) -> PeakRates:
    """Return the best rates seen within a time budget, roughly, that is shared by all of them.

    Products are measured in the formats given and in fp32, in which 16-bit operands may be multiplied too. Syncs: yes.
    """
    sizes = STREAM_BYTES["cuda" if device.type == "cuda" else "cpu"]
    names = dict.fromkeys(("fp32", *number_formats))
    share_s = budget_s / (len(names) + 1)
    return PeakRates(
        matmul={name: matmul_rate(name, device, share_s) for name in names},
        stream={size: stream_rate(size, device, share_s / len(sizes)) for size in sizes},
    )
