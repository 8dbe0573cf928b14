"""Tables and pictures: every figure from the result, plain in a pipe, and nothing cut off."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tests.bench.script import load_script

from mezzo.bench.measurement import Measurement, PointRoofline, Result
from mezzo.bench.results_table import (
    cells,
    charts,
    footnotes,
    header,
    label,
    print_result,
    save_chart,
    title,
)
from mezzo.bench.roofline import PeakRates, Phase
from mezzo.bench.variant import VARIANTS

PHASES = {"fp32": (Phase(name="products", flops=8e9),), "bf16": (Phase(name="products", flops=8e9),)}


def measurement(variant: str, point: str, seconds: tuple[float, ...], **more: object) -> Measurement:
    fields = {"units": 10, "loss": 1.00914645, "peak_bytes": 1_283_800_000, "data_bytes": 2_000_000, **more}
    form = VARIANTS[variant].number_format(torch.bfloat16)
    return Measurement(point=point, variant=variant, number_format=form, seconds=seconds, **fields)


RESULT = Result(
    workload="recipe", unit="step", date="2026-11-21T10:00:00+00:00", tests="12 passed in 3.40s", plan={}, config={},
    machine={"device": "cpu", "cpu": {"model": "AMD EPYC"}, "threads": 2},
    peak_rates=PeakRates(matmul={"fp32": 100e9, "bf16": 400e9}, stream={2**20: 90e9, 2**28: 30e9}),
    rooflines={"512 x 1024 x 3": PointRoofline(phases=PHASES)},
    measurements=(
        measurement("fp32", "512 x 1024 x 3", (1.5, 1.6, 2.0)),
        measurement("torch-amp", "512 x 1024 x 3", (0.5, 0.4, 0.7), peak_bytes=1_409_700_000),
        measurement("torch-amp+compile", "512 x 1024 x 3", (0.25, 0.3, 0.2)),
        measurement("prepare-master+compile", "512 x 1024 x 3", (0.2, 0.2, 0.2), measures={"accuracy": 0.875}),
    ),
)  # fmt: skip
GOLDEN = [
    ("fp32", "1.60 s", "1.50-2.00 s", "160.00 ms", "1.00x", "0.31x", "50%", "1283.8 MB", "1.00x", "1.00915", "-"),
    ("torch-amp", "500.00 ms", "400.00-700.00 ms", "50.00 ms", "3.20x", "1.00x", "40%", "1409.7 MB", "1.10x",
     "1.00915", "-"),
    ("torch-amp, compiled", "250.00 ms", "200.00-300.00 ms", "25.00 ms", "6.40x", "1.00x", "80%", "1283.8 MB",
     "1.00x", "1.00915", "-"),
    ("prepare bf16-master, compiled", "200.00 ms", "200.00-200.00 ms", "20.00 ms", "8.00x", "1.25x", "100%",
     "1283.8 MB", "1.00x", "1.00915", "0.875"),
]  # fmt: skip


def test_rows() -> None:
    assert [tuple(cells(RESULT, m).values()) for m in RESULT.measurements] == GOLDEN
    assert header(RESULT)[-1] == "accuracy"
    assert all(len(row) == len(header(RESULT)) for row in GOLDEN)


def test_a_row_is_held_against_the_fastest_rival_run_in_the_same_way() -> None:
    seconds = {
        "torch-autocast": 2.0, "accelerate": 1.5, "torch-16bit": 0.1, "mezzo-autocast": 1.2, "prepare": 1.0,
        "torch-autocast+keep": 1.0, "fabric+keep": 3.0, "prepare+keep": 0.8, "prepare-master+keep+compile": 0.5,
    }  # fmt: skip
    found = tuple(measurement(name, "p", (took,)) for name, took in seconds.items())
    served = dataclasses.replace(RESULT, measurements=found, rooflines={"p": PointRoofline()})
    rows = {m.variant: cells(served, m) for m in found}
    ratios = {name: of["than fastest rival"] for name, of in rows.items()}
    assert ratios == {
        "torch-autocast": "0.75x", "accelerate": "1.00x", "torch-16bit": "15.00x", "mezzo-autocast": "1.25x",
        "prepare": "1.50x", "torch-autocast+keep": "1.00x", "fabric+keep": "0.33x", "prepare+keep": "1.25x",
        "prepare-master+keep+compile": "-",
    }  # fmt: skip
    assert rows["prepare+keep"]["variant"] == "prepare bf16, kept"
    assert rows["prepare-master+keep+compile"]["variant"] == "prepare bf16-master, kept, compiled"


def test_what_was_not_measured_is_a_dash() -> None:
    alone = dataclasses.replace(
        RESULT, measurements=RESULT.measurements[1:2], rooflines={"512 x 1024 x 3": PointRoofline()}
    )
    row = cells(alone, alone.measurements[0])
    assert [row[name] for name in ("faster than fp32", "than fastest rival", "of roofline", "of fp32's")] == [
        "-",
        "1.00x",
        "-",
        "-",
    ]


def test_a_pipe_gets_every_figure_and_no_escape_codes() -> None:
    out = io.StringIO()
    print_result(RESULT, out)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "…" not in text
    for row in GOLDEN:
        begin = f"{row[0]} {row[1]}".split()
        line = next(line for line in text.splitlines() if line.split()[: len(begin)] == begin)
        assert line.split() == " ".join(row).split()
    for note in footnotes(RESULT):
        assert note in " ".join(text.split())


def test_footnotes() -> None:
    assert footnotes(RESULT) == (
        "Rivals: torch.autocast, torch.amp, Accelerate, Fabric, FlashOptim and torchao as far as they are in the table, run as the row is.",
        "Peak rates measured in the same run: products fp32 100, bf16 400 GFLOP/s, memory 30.0 GB/s.",
        "Roofline: the least work of each phase over these peak rates; 100% is as fast as the machine can be.",
        "Peak memory is above the process's baseline after import. The batches kept on the device are 2.0 MB of it.",
        "Tests of the timed code: 12 passed in 3.40s.",
    )


def test_markdown() -> None:
    lines = load_script("performance").markdown_table(RESULT).splitlines()
    assert lines[0] == f"| {' | '.join(header(RESULT))} |"
    assert lines[1] == "| :--- | " + " | ".join(["---:"] * 10) + " |"
    assert lines[2:] == [f"| {' | '.join(row)} |" for row in GOLDEN]


def test_several_points_have_a_column() -> None:
    assert header(swept())[:2] == ("point", "variant")
    firsts = [tuple(cells(swept(), m).values())[:2] for m in swept().measurements[:2]]
    assert firsts == [("width 64", "fp32"), ("width 64", "torch-amp")]
    assert title(swept()) == "recipe on AMD EPYC, 2 threads: median of 3 interleaved rounds"
    assert title(RESULT) == "recipe 512 x 1024 x 3 on AMD EPYC, 2 threads: median of 3 interleaved rounds"


def swept() -> Result:
    points = {f"{axis} {size}": (axis, size) for axis in ("width", "batch") for size in (64, 128, 3_148_800)}
    return dataclasses.replace(
        RESULT,
        rooflines={
            label: PointRoofline(axis=axis, value=size, phases=PHASES) for label, (axis, size) in points.items()
        },
        measurements=tuple(
            measurement(name, label, (size * 1e-4, size * 1.1e-4, size * 2e-4))
            for label, (_, size) in points.items()
            for name in ("fp32", "torch-amp", "torch-amp+compile")
        ),
    )


def test_bars_are_medians_and_peaks() -> None:
    time, memory = charts(RESULT)
    assert time.labels == memory.labels == tuple(label(m) for m in RESULT.measurements)
    assert time.series[0].values == tuple(1e3 * m.median / 10 for m in RESULT.measurements)
    assert memory.series[0].values == tuple(m.peak_bytes / 1e6 for m in RESULT.measurements)


def test_lines_are_the_gain_over_the_fastest_rival_by_size() -> None:
    sizes = swept()
    found = tuple(m for m in sizes.measurements if "+" not in m.variant)
    own = tuple(
        dataclasses.replace(m, variant="prepare", seconds=(size * 1e-5,))
        for m, size in ((m, sizes.rooflines[m.point].value) for m in found if m.variant == "fp32")
    )
    wide, deep = charts(dataclasses.replace(sizes, measurements=(*found, *own)))
    assert (wide.labels, deep.kind) == (("64", "128", "3,148,800"), "lines")
    assert [series.name for series in wide.series] == ["prepare"]
    assert wide.series[0].values == pytest.approx((11.0, 11.0, 11.0))


@pytest.mark.parametrize("made", [RESULT, swept()], ids=["bars", "lines"])
def test_the_picture_is_a_picture(made: Result, tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    save_chart(made, path)
    root = ElementTree.parse(path).getroot()
    inner = [part for part in root if part.tag.endswith("svg")]
    assert len(inner) == 2
    assert float(root.get("height", 0)) > sum(float(part.get("height", 0)) for part in inner) > 200


@pytest.mark.parametrize(
    "processor", ["Z", "AMD EPYC (family 25, model 17) with a name that no picture has room for beside the rest"]
)
def test_a_title_has_room(processor: str, tmp_path: Path) -> None:
    machine = {**RESULT.machine, "cpu": {**RESULT.machine["cpu"], "model": processor}}
    save_chart(dataclasses.replace(RESULT, machine=machine), tmp_path / "chart.svg")
    root = ElementTree.parse(tmp_path / "chart.svg").getroot()
    title = next(part for part in root if part.tag.endswith("text"))
    assert processor in str(title.text)
    pixels = float(str(title.get("style")).partition("bold ")[2].partition("px")[0])
    assert (pixels == 11) is (processor == "Z")
    assert len(str(title.text)) * 7 * pixels / 11 <= float(root.get("width", 0)) + 1
