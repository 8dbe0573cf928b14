"""The page of figures: made from the stored results alone, and up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mezzo.bench import load
from mezzo.bench.measurement import Measurement, PointRoofline, Result
from mezzo.bench.performance import PAGE, RESULTS, newest, page
from mezzo.bench.results_table import markdown_table
from mezzo.bench.roofline import PeakRates
from mezzo.cli import main
from mezzo.cli.bench import save
from mezzo.errors import BenchError

ROOT = Path(__file__).parents[2]


def result(workload: str = "recipe", date: str = "2026-11-21T10:00:00+00:00", gpu: str = "") -> Result:
    device = {"device": "cuda", "gpu": {"name": gpu}} if gpu else {"device": "cpu"}
    found = [
        Measurement(
            point="small", variant=name, number_format="fp32", seconds=(seconds,), units=1, loss=0.25,
            peak_bytes=1, data_bytes=0,
        )
        for name, seconds in (("fp32", 2.0), ("torch-amp", 0.5))
    ]  # fmt: skip
    return Result(
        workload=workload, unit="step", date=date, tests="3 passed", plan={"dtype": "bf16"}, config={},
        machine={**device, "cpu": {"model": "X"}, "threads": 2, "versions": {"torch": "2.13", "mezzo": "1"}, "commit": "abc"},
        peak_rates=PeakRates(matmul={"fp32": 1.0}, stream={1: 1.0}), rooflines={"small": PointRoofline()}, measurements=tuple(found),
    )  # fmt: skip


def test_the_page_on_disk_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(ROOT / RESULTS, ROOT / PAGE)


def test_the_newest_of_each_workload_and_machine() -> None:
    old, new = result(date="2026-11-20T10:00:00+00:00"), result(date="2026-11-21T10:00:00+00:00")
    elsewhere, other = result(gpu="NVIDIA H200"), result("step")
    assert newest([other, new, elsewhere, old]) == [elsewhere, new, other]


def test_sizes_stand_beside_each_other(tmp_path: Path) -> None:
    """A second size of the same day is another file and another section; the same size again replaces its own."""
    small = result()
    large = dataclasses.replace(small, rooflines={"large": PointRoofline()}, date="2026-11-21T11:00:00+00:00")
    again = dataclasses.replace(small, date="2026-11-21T12:00:00+00:00")
    assert newest([small, large, again]) == [large, again]
    paths = [save(one, tmp_path)[0] for one in (small, large, again)]
    assert paths[0] == paths[2] != paths[1]
    assert load(paths[0]) == again and load(paths[1]) == large


def test_a_page(tmp_path: Path) -> None:
    stored, place = tmp_path / "results", tmp_path / "docs" / "performance.md"
    stored.mkdir()
    one, two = result(), result("step", gpu="NVIDIA H200")
    (stored / "a.json").write_text(one.to_json())
    (stored / "a.png").touch()
    (stored / "b.json").write_text(two.to_json())
    text = page(stored, place)
    for part in (
        "## recipe\n\nLinear layers trained", "### X, 2 threads\n", "## step\n\nUnscaling", "### NVIDIA H200\n",
        markdown_table(one), "](../results/a.png)", "commit abc, bf16.", "Tests of the timed code: 3 passed.",
    ):  # fmt: skip
        assert part in text
    assert "b.png" not in text
    assert text.index("## recipe") < text.index("## step")


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, place = tmp_path / "results", tmp_path / "docs" / "performance.md"
    stored.mkdir()
    words = ["bench", "docs", "--results", str(stored), "--page", str(place)]
    assert main([*words, "--check"]) == 1
    assert "run `mezzo bench docs`" in capsys.readouterr().err
    assert main(words) == 0
    assert "No results are stored yet." in place.read_text()
    assert main([*words, "--check"]) == 0
    (stored / "a.json").write_text(result().to_json())
    assert main([*words, "--check"]) == 1


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(BenchError, match=r"a\.json: not a benchmark result"):
        page(tmp_path, tmp_path / "p.md")


def test_a_result_of_a_workload_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(dataclasses.replace(result(), workload="alexnet").to_json())
    with pytest.raises(BenchError, match=r"a\.json: unknown workload 'alexnet'"):
        page(tmp_path, tmp_path / "p.md")
