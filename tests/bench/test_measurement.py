"""Results: statistics as laws, and JSON that loses nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.bench.measurement import Measurement, PointRoofline, Result, from_json, load
from mezzo.bench.roofline import PeakRates, Phase
from mezzo.errors import BenchError

SECONDS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9)
TEXT = st.text(max_size=5)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def measurement(variant: str = "fp32", seconds: tuple[float, ...] = (1.0,), point: str = "p") -> Measurement:
    return Measurement(
        point=point, variant=variant, number_format="fp32", seconds=seconds, units=2, loss=0.5, peak_bytes=10, data_bytes=1
    )  # fmt: skip


def result(*measurements: Measurement) -> Result:
    return Result(
        workload="recipe", unit="step", date="2026-11-21T00:00:00+00:00", tests="1 passed", plan={"rounds": 3}, config={},
        machine={"device": "cpu", "cpu": {"model": "X"}, "threads": 2},
        peak_rates=PeakRates(matmul={"fp32": 10.0}, stream={1: 10.0}),
        rooflines={m.point: PointRoofline(phases={"fp32": (Phase(name="products", flops=4.0),)}) for m in measurements},
        measurements=measurements,
    )  # fmt: skip


@given(SECONDS, st.permutations(range(9)), st.floats(0.5, 2.0))
def test_statistics(seconds: list[float], order: list[int], factor: float) -> None:
    m = measurement(seconds=tuple(seconds))
    assert m.low <= m.median <= m.high
    below, above = sum(s < m.median for s in seconds), sum(s > m.median for s in seconds)
    assert max(below, above) <= len(seconds) // 2
    shuffled = measurement(seconds=tuple(seconds[i] for i in order if i < len(seconds)))
    assert (shuffled.low, shuffled.median, shuffled.high) == (m.low, m.median, m.high)
    doubled = measurement(seconds=tuple(2 * s for s in seconds))
    assert (doubled.low, doubled.median, doubled.high) == (2 * m.low, 2 * m.median, 2 * m.high)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(BenchError, match="variant fp32 has no samples"):
        measurement(seconds=())


def test_ratios_are_of_medians_at_the_same_point() -> None:
    slow, fast = measurement("fp32", (4.0, 8.0, 6.0)), measurement("torch-amp", (2.0, 1.0, 9.0))
    elsewhere = measurement("fp32", (100.0,), point="q")
    found = result(slow, fast, elsewhere)
    assert found.ratio(fast, "fp32") == 3.0
    assert found.ratio(slow, "torch-amp") == 1 / 3.0
    assert found.ratio(slow, "fp32") == 1.0
    assert found.ratio(elsewhere, "torch-amp") is None


def test_share_of_floor_counts_every_unit() -> None:
    m = measurement(seconds=(1.6,))
    assert result(m).share_of_roofline(m) == 2 * (4.0 / 10.0) / 1.6
    unstated = dataclasses.replace(m, number_format="bf16")
    assert result(unstated).share_of_roofline(unstated) is None


MEASUREMENTS = st.builds(
    Measurement, point=TEXT, variant=TEXT, number_format=TEXT, seconds=SECONDS.map(tuple), units=st.integers(1, 99),
    loss=FINITE, peak_bytes=st.integers(), data_bytes=st.integers(), measures=st.dictionaries(TEXT, FINITE, min_size=1),
)  # fmt: skip
PHASES = st.builds(Phase, name=TEXT, flops=FINITE, moved_bytes=FINITE)
FLOORS = st.builds(
    PointRoofline, axis=TEXT, value=FINITE, phases=st.dictionaries(TEXT, st.lists(PHASES, max_size=2).map(tuple))
)
FACTS = st.dictionaries(TEXT, st.one_of(TEXT, st.integers(), st.lists(TEXT)))
RESULTS = st.builds(
    Result, workload=TEXT, unit=TEXT, date=TEXT, tests=TEXT, plan=FACTS, config=FACTS, machine=FACTS,
    peak_rates=st.builds(PeakRates, matmul=st.dictionaries(TEXT, FINITE), stream=st.dictionaries(st.integers(), FINITE)),
    rooflines=st.dictionaries(TEXT, FLOORS, max_size=2), measurements=st.lists(MEASUREMENTS, max_size=2).map(tuple),
)  # fmt: skip


@given(RESULTS)
def test_json_loses_nothing(stored: Result) -> None:
    assert from_json(stored.to_json()) == stored
    assert set(json.loads(stored.to_json())) == {f.name for f in dataclasses.fields(Result)}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"workload": "recipe"}', '{"peak_rates": 3}'])
def test_what_is_no_result_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"r.json: not a benchmark result: .*; write one with `mezzo bench"):
        load(path)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read .*none.json: No such file or directory."):
        load(tmp_path / "none.json")
