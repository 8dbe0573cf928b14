"""What a benchmark leaves behind: samples, their medians, and the JSON they are kept in."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BenchError
from .roofline import PeakRates, Phase, roofline_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One variant at one point of a workload.

    Attributes:
        number_format: the format its large matrix products run in.
        seconds: raw samples in the order they were taken, one a round; each is the whole timed unit.
        units: how many times the unit does what the workload names (steps, forwards).
        loss: after the last round; the same number of steps for every variant.
        peak_bytes: most memory above the process's baseline after import, building and warm-up included.
        data_bytes: how much of that the batches take, the same for every variant.
    """

    point: str
    variant: str
    number_format: str
    seconds: tuple[float, ...]
    units: int
    loss: float
    peak_bytes: int
    data_bytes: int
    measures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a measurement without samples."""
        if not self.seconds:
            raise BenchError(f"variant {self.variant} has no samples; take at least one round.")

    @property
    def median(self) -> float:
        """Median of the samples, seconds."""
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        """Fastest sample, seconds."""
        return min(self.seconds)

    @property
    def high(self) -> float:
        """Slowest sample, seconds."""
        return max(self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRoofline:
    """The least work of one point, which lies at a value of an axis as `Point` says: phases of one unit, by format of the large products."""

    axis: str = ""
    value: float = 0.0
    phases: dict[str, tuple[Phase, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A benchmark with everything needed to judge it or to run it again.

    Attributes:
        unit: what is counted: "step", "forward".
        date: when it began, ISO 8601, UTC.
        tests: what the tests of the measured code said before the measurement.
        plan: variants, rounds, device, dtype, threads, seed.
        config: the workload's own numbers.
        machine: hardware, versions, commit.
        rooflines: the least work of each point, by label.
    """

    workload: str
    unit: str
    date: str
    tests: str
    plan: dict[str, Any]
    config: dict[str, Any]
    machine: dict[str, Any]
    peak_rates: PeakRates
    rooflines: dict[str, PointRoofline]
    measurements: tuple[Measurement, ...]

    @property
    def kind(self) -> tuple[bool, tuple[str, ...]]:
        """What a later result must share to take this one's place, beside workload and machine: all compiled or not, and points."""
        return all(m.variant.endswith("+compile") for m in self.measurements), tuple(self.rooflines)

    def at(self, point: str) -> dict[str, Measurement]:
        """Return the measurements of a point by variant, in the order they were planned."""
        return {m.variant: m for m in self.measurements if m.point == point}

    def ratio(self, measurement: Measurement, baseline: str) -> float | None:
        """Return how many times faster a measurement is than a baseline of its point, by medians; None without one."""
        other = self.at(measurement.point).get(baseline)
        return other.median / measurement.median if other else None

    def share_of_roofline(self, measurement: Measurement) -> float | None:
        """Return the roofline over the median time: 1 is as fast as the machine can be; None where no roofline is stated."""
        number_format = measurement.number_format
        phases = self.rooflines[measurement.point].phases.get(number_format)
        if not phases:
            return None
        return measurement.units * roofline_seconds(phases, self.peak_rates, number_format) / measurement.median

    def to_json(self) -> str:
        """Return the result as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def from_json(text: str | bytes) -> Result:
    """Return the result that `Result.to_json` wrote. Raises: BenchError: the text is not a benchmark result."""
    try:
        stored = json.loads(text)
        rooflines = stored.pop("rooflines")
        measurements = stored.pop("measurements")
        peak_rates = PeakRates.from_plain(stored.pop("peak_rates"))
        for one in rooflines.values():
            one["phases"] = {name: tuple(Phase(**phase) for phase in found) for name, found in one["phases"].items()}
        return Result(
            **stored,
            peak_rates=peak_rates,
            rooflines={label: PointRoofline(**one) for label, one in rooflines.items()},
            measurements=tuple(Measurement(**{**m, "seconds": tuple(m["seconds"])}) for m in measurements),
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"not a benchmark result: {error}; write one with `mezzo bench ... --out DIR`.") from None


def load(path: Path) -> Result:
    """Return the result stored in a file. Raises: BenchError: it cannot be read or is not a benchmark result."""
    try:
        return from_json(path.read_bytes())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}.") from None
    except BenchError as error:
        raise BenchError(f"{path}: {error}") from None
