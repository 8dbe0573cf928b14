"""`mezzo demo`: both jobs in one table, with the pictures."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from mezzo.bench import Reviews, load
from mezzo.bench.measurement import Measurement, PointRoofline, Result
from mezzo.bench.roofline import PeakRates
from mezzo.cli import demo, main
from mezzo.errors import BenchError
from mezzo.formats import native_support


def result(workload: str, variants: tuple[str, ...], **measures: float) -> Result:
    found = [
        Measurement(
            point="p", variant=name, number_format="fp32", seconds=(3.0 / place,), units=1, loss=0.5,
            peak_bytes=2_000_000 * place, data_bytes=0, measures=measures,
        )
        for place, name in enumerate(variants, start=1)
    ]  # fmt: skip
    return Result(
        workload=workload, unit="run", date="2026-11-21T10:00:00+00:00", tests=demo.NOT_TESTED, plan={}, config={},
        machine={"device": "cpu", "cpu": {"model": "X"}, "threads": 2}, peak_rates=PeakRates(matmul={"fp32": 1.0}, stream={1: 1.0}),
        rooflines={"p": PointRoofline()}, measurements=tuple(found),
    )  # fmt: skip


RECIPE, REVIEWS = (
    result("recipe", ("fp32", "torch-amp", "mezzo-amp")),
    result("reviews", ("fp32", "mezzo-amp"), accuracy=0.875),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    asked: list[tuple[object, object]] = []

    def measured(workload: object, plan: object, tests: str) -> Result:
        asked.append((workload, plan))
        return RECIPE if len(asked) == 1 else REVIEWS

    monkeypatch.setattr(demo, "measured", measured)
    return asked


def test_one_table_of_both_jobs(
    asked: list[tuple[object, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path), "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert "in bf16" in printed or "in fp16" in printed
    assert "Peak memory is above" in printed and "Roofline" not in printed  # a note on a column that is not there
    assert ["recipe", "fp32", "3.00", "s", "1.00x", "2.0", "MB", "1.00x", "0.5", "-"] in lines
    assert ["recipe", "mezzo-amp", "1.00", "s", "3.00x", "6.0", "MB", "3.00x", "0.5", "-"] in lines
    assert ["reviews", "mezzo-amp", "1.50", "s", "2.00x", "4.0", "MB", "2.00x", "0.5", "0.8750"] in lines
    shown = [line[0] for line in lines if line and line[0].endswith((".png", ".svg"))]
    assert [Path(path).name for path in shown] == [
        "recipe_x-2t_2026-11-21.svg", "reviews_x-2t_2026-11-21.svg", "curves.png", "curves.png",
    ]  # fmt: skip
    assert all(Path(path).exists() for path in shown[:2])
    (_, first), (reviews, second) = asked
    assert first.rounds == 2
    assert set(first.variants) >= {"fp32", "torch-autocast", "torch-amp", "mezzo-autocast", "mezzo-amp"}
    assert (second.rounds, second.variants) == (1, ("fp32", "mezzo-amp"))
    assert reviews.folder == str(tmp_path / "reviews")
    assert shown[2:] == [str(tmp_path / "reviews" / name / "curves.png") for name in ("fp32", "mezzo-amp")]


def test_json(asked: list[tuple[object, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"recipe": json.loads(RECIPE.to_json()), "reviews": json.loads(REVIEWS.to_json())}


def test_what_was_measured_before_something_failed_is_printed_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(workload: object, plan: object, tests: str) -> Result:
        if isinstance(workload, Reviews):
            raise BenchError("it failed.")
        return RECIPE

    monkeypatch.setattr(demo, "measured", measured)
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "mezzo-amp" in said.out and "recipe_x-2t_2026-11-21.svg" in said.out and "curves" not in said.out
    assert said.err.endswith("mezzo demo: it failed.\n")
    assert load(next(tmp_path.glob("*.json"))) == RECIPE


def test_what_cannot_be_saved_is_printed(
    asked: list[tuple[object, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mezzo.files.move_into_place", full)
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path), "--json"]) == 2
    assert set(json.loads(capsys.readouterr().out)) == {"recipe"}
    assert list(tmp_path.iterdir()) == []


def test_the_dtype_is_that_of_the_device() -> None:
    cpu = torch.device("cpu")
    low = demo.low_dtype(cpu)
    assert low in (torch.bfloat16, torch.float16)
    assert native_support(cpu, low).native or low is torch.bfloat16


@pytest.mark.slow
def test_the_demonstration_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path), "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    accuracy = {m["variant"]: m["measures"]["accuracy"] for m in found["reviews"]["measurements"]}
    assert min(accuracy.values()) >= 0.85
    assert abs(accuracy["fp32"] - accuracy["mezzo-amp"]) <= 0.02
    for name in accuracy:
        assert (tmp_path / "reviews" / name / "curves.png").exists()


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mezzo.cli.demo.measure_both", lambda options: pytest.fail("measured"))
    (tmp_path / "taken").touch()
    assert main(["demo", "--out", str(tmp_path / "taken")]) == 2
    assert capsys.readouterr().err == (
        f"mezzo demo: --out {tmp_path / 'taken'}: no such folder can be made: File exists. Name a folder that can be.\n"
    )


@pytest.mark.parametrize("option", ["--rows", "--rounds"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_rows_and_no_rounds_are_told_before_anything_is_made(
    option: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mezzo.cli.demo.measure_both", lambda options: pytest.fail("measured"))
    assert main(["demo", "--out", str(tmp_path / "new"), option, number]) == 2
    assert capsys.readouterr().err == f"mezzo demo: {option} {number}: give at least 1, or leave it out.\n"
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_shut_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mezzo.cli.demo.measure_both", lambda options: pytest.fail("measured"))
    monkeypatch.setattr("mezzo.files.os.access", lambda path, how: False)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    told = f"mezzo demo: --out {tmp_path}: {tmp_path} cannot be written. Name a folder that can be.\n"
    assert capsys.readouterr().err == told
