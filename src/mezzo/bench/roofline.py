"""The least time a machine can take: operations over its measured rate, bytes over its measured bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BenchError


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRates:
    """What this machine was measured to do, in the same run as what is held against it.

    Attributes:
        matmul: floating-point operations per second of the best large matrix product, by format name.
        stream: bytes read and written per second, by bytes in the array; from within the caches to well beyond.
    """

    matmul: dict[str, float]
    stream: dict[int, float]

    def bandwidth(self, moved_bytes: float) -> float:
        """Return the bytes per second that nothing of this size can beat.

        A set that fits a cache moves faster than memory does, so the rate is the best one measured at this size
        or above it.
        """
        at = max((size for size in self.stream if size <= moved_bytes), default=min(self.stream))
        return max(rate for size, rate in self.stream.items() if size >= at)

    def best(self, other: PeakRates) -> PeakRates:
        """Return the higher of two measurements of the same machine, rate by rate."""
        return PeakRates(
            matmul={name: max(rate, other.matmul.get(name, 0.0)) for name, rate in self.matmul.items()},
            stream={size: max(rate, other.stream.get(size, 0.0)) for size, rate in self.stream.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a workload that must end before the next can.

    Attributes:
        name: what is done.
        flops: floating-point operations in matrix products.
        moved_bytes: bytes that must be read or written at least once.
    """

    name: str
    flops: float = 0.0
    moved_bytes: float = 0.0

    def seconds(self, peak_rates: PeakRates, number_format: str) -> float:
        """Return the least time of this phase with products in a format.

        Raises:
            BenchError: the format's rate was not measured.
        """
        if self.flops and number_format not in peak_rates.matmul:
            raise BenchError(
                f"the roofline of '{self.name}' needs the matmul rate of {number_format}, but only "
                f"{', '.join(peak_rates.matmul)} were measured; add {number_format} to the peak rates of this run."
            )
        computing = self.flops / peak_rates.matmul[number_format] if self.flops else 0.0
        moving = self.moved_bytes / peak_rates.bandwidth(self.moved_bytes) if self.moved_bytes else 0.0
        return max(computing, moving)


def roofline_seconds(phases: Sequence[Phase], peak_rates: PeakRates, number_format: str) -> float:
    """Return the least time of phases that follow each other: in each, computing and moving may overlap.

    Source: Williams et al. 2009, the roofline model, applied phase by phase.
    """
    return sum(phase.seconds(peak_rates, number_format) for phase in phases)
