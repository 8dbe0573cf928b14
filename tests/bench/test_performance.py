"""The page of figures: made from the stored results alone, and up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.bench.script import load_script

from mezzo.bench import load
from mezzo.bench.measurement import Measurement, PointRoofline, Result
from mezzo.bench.roofline import PeakRates
from mezzo.cli.bench import save
from mezzo.errors import BenchError

script = load_script("performance")


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
    assert script.PAGE.read_text(encoding="utf-8") == script.page(script.RESULTS, script.PAGE)


def test_the_figures_of_the_readme_are_up_to_date() -> None:
    text = script.README.read_text(encoding="utf-8")
    assert text == script.with_figures(text, script.RESULTS)


def measured(variant: str, *seconds: float, point: str = "small", peak_bytes: int = 100) -> Measurement:
    return Measurement(
        point=point, variant=variant, number_format="bf16", seconds=seconds, units=1, loss=0.25, peak_bytes=peak_bytes,
        data_bytes=0,
    )  # fmt: skip


def test_wins_ties_and_losses(tmp_path: Path) -> None:
    found = (
        measured("torch-autocast", 2.0, 2.2, 2.1), measured("torch-amp", 3.0, 3.0, 3.0),
        measured("prepare", 2.0, 2.3, 2.1, peak_bytes=80), measured("prepare-master", 1.0, 1.1, 1.0, peak_bytes=70),
        measured("torch-amp+keep", 1.0, 1.0, 1.0), measured("prepare+keep", 1.1, 1.25, 1.2, peak_bytes=90),
        measured("torch-autocast+compile", 1.0), measured("prepare-master+compile", 2.0),
    )  # fmt: skip
    (tmp_path / "a.json").write_text(dataclasses.replace(result(), measurements=found).to_json())
    assert script.figures(tmp_path).splitlines() == [
        "| workload | policy | X, 2 threads | peak memory of the rival's |", "| --- | --- | ---: | ---: |",
        "| `recipe` small | bf16 | 1.00x tie / 1.75x / 0.83x loss | 0.90x |",
        "| `recipe` small | bf16-master | 2.10x | 0.70x |",
        "| `recipe` small, compiled | bf16-master | 0.50x tie | 1.00x |",
    ]  # fmt: skip


def test_the_summary_is_as_recommended_and_counts_every_way(tmp_path: Path) -> None:
    """A line a workload, eager, mezzo's memory kept and the rival's not; what is not won is said, compiled lines are counted."""
    rivals = [measured("torch-autocast", 2.0, 2.0, point=point) for point in ("a", "b")]
    kept = [measured("prepare+keep", took, took, point=point) for point, took in (("a", 0.5), ("b", 4.0))]
    compiled = [
        measured("torch-autocast+compile", 1.0, 1.0, point="a"),
        measured("prepare+compile", 2.0, 2.0, point="a"),
    ]
    masters = [measured("prepare-master", 1.0, 1.0, point="a", peak_bytes=70)]
    rooflines = {point: PointRoofline() for point in ("a", "b")}
    sizes = dataclasses.replace(result(), measurements=(*rivals, *kept, *compiled, *masters), rooflines=rooflines)
    (tmp_path / "a.json").write_text(sizes.to_json())
    one = (measured("torch-autocast", 2.0, 2.0), measured("prepare", 4.0, 4.0), measured("prepare+capture", 1.0, 1.0))
    (tmp_path / "b.json").write_text(dataclasses.replace(result("step", gpu="NVIDIA H200"), measurements=one).to_json())
    assert script.summary(tmp_path).splitlines() == [
        "| workload | X, 2 threads | peak memory of the rival's |", "| --- | ---: | ---: |",
        "| `recipe` 2 sizes | 1.41x 1 loss, 2.00x | 0.70-1.00x |",
        "| all ways to run them | 2 win, 2 loss | - |",
        "",
        "| workload | NVIDIA H200, captured | NVIDIA H200, eager | peak memory of the rival's |", "| --- | ---: | ---: | ---: |",
        "| `step` small | 2.00x | 0.50x loss | 1.00x |",
        "| all ways to run them | 1 win | 1 loss | - |",
    ]  # fmt: skip


def test_several_sizes_are_one_line(tmp_path: Path) -> None:
    found = [measured("torch-autocast", 2.0, 2.0, point=point) for point in ("a", "b", "c")]
    found += [measured("prepare", took, took, point=point) for point, took in (("a", 1.0), ("b", 4.0), ("c", 2.0))]
    rooflines = {point: PointRoofline() for point in ("a", "b", "c")}
    several = dataclasses.replace(result(), measurements=tuple(found), rooflines=rooflines)
    (tmp_path / "a.json").write_text(several.to_json())
    (tmp_path / "b.json").write_text(result("step", gpu="NVIDIA H200").to_json())
    assert script.figures(tmp_path).splitlines()[2:] == [
        "| `recipe` 3 sizes | bf16 | 0.50-2.00x: 1 win, 1 tie, 1 loss | 1.00x |"
    ]


def test_each_machine_is_a_column(tmp_path: Path) -> None:
    for name, model, took in (("a", "one", 1.0), ("b", "one", 4.0), ("c", "other", 0.5)):
        machine = {**result().machine, "cpu": {"model": model}, "threads": 2}
        both = (measured("torch-autocast", 2.0, 2.0), measured("prepare", took, took, peak_bytes=int(took * 100)))
        own = dataclasses.replace(result("recipe" if name == "a" else "step"), measurements=both, machine=machine)
        (tmp_path / f"{name}.json").write_text(own.to_json())
    assert script.figures(tmp_path).splitlines()[2:] == [
        "| `recipe` small | bf16 | 2.00x | - | 1.00x |", "| `step` small | bf16 | 0.50x loss | 4.00x | 0.50-4.00x |",
    ]  # fmt: skip


def test_a_gpu_is_two_columns_the_second_of_steps_that_a_graph_launches(tmp_path: Path) -> None:
    """The rival of a captured step is an eager one: nobody captures a rival."""
    found = (
        measured("torch-autocast", 2.0, 2.2, 2.1), measured("prepare", 4.0, 4.4, 4.2, peak_bytes=80),
        measured("prepare+capture", 1.0, 1.1, 1.0, peak_bytes=70), measured("prepare-master", 2.0, 2.2, 2.1),
    )  # fmt: skip
    (tmp_path / "a.json").write_text(dataclasses.replace(result(gpu="NVIDIA H200"), measurements=found).to_json())
    (tmp_path / "b.json").write_text(result("step", gpu="NVIDIA H200").to_json())
    assert script.figures(tmp_path).splitlines() == [
        "| workload | policy | NVIDIA H200, captured | NVIDIA H200, eager | peak memory of the rival's |",
        "| --- | --- | ---: | ---: | ---: |",
        "| `recipe` small | bf16 | 2.10x | 0.50x loss | 0.70-0.80x |",
        "| `recipe` small | bf16-master | - | 1.00x tie | 1.00x |",
    ]  # fmt: skip


def test_the_sentence_of_the_figures(tmp_path: Path) -> None:
    """Kept memory against rivals as they are, over all training workloads; memory beside fp32's."""
    rival = (measured("torch-autocast", 2.0), measured("torch-amp", 4.0), measured("fp32", 4.0))
    ours = {
        "recipe": (measured("prepare+keep", 1.0), measured("prepare-master", 1.0, peak_bytes=70)),
        "bert": (measured("prepare+keep", 4.0),),
        "lora": (measured("prepare+keep", 0.1),),  # no model as people train it: does not count
    }
    for workload, found in ours.items():
        one = dataclasses.replace(result(workload), measurements=(*rival, *found))
        (tmp_path / f"{workload}.json").write_text(one.to_json())
    assert script.sentence(tmp_path) == (
        "With [memory kept](docs/memory.md), training steps of 2 models beside the fastest eager rival as people run it, "
        "in geometric mean: on 1 CPU 1.00x the speed under `bf16` (0.50x to 2.00x). "
        "The published amp tutorial takes 0.25x of fp32's time and 0.70x of its memory under `bf16-master`."
    )


def test_the_sentence_keeps_apart_where_16_bit_is_emulated(tmp_path: Path) -> None:
    for model, own, rate in (("one", 1.0, 2.0), ("other", 4.0, 2.0), ("emulates", 0.5, 0.5)):
        machine = {**result().machine, "cpu": {"model": model}, "threads": 2}
        both = (measured("torch-autocast", 2.0), measured("prepare+keep", own))
        rates = PeakRates(matmul={"fp32": 1.0, "bf16": rate}, stream={1: 1.0})
        one = dataclasses.replace(result("bert"), measurements=both, machine=machine, peak_rates=rates)
        (tmp_path / f"{model}.json").write_text(one.to_json())
    assert script.sentence(tmp_path) == (
        "With [memory kept](docs/memory.md), training steps of a model beside the fastest eager rival as people run it, in geometric mean: "
        "on 2 CPUs 1.00x the speed under `bf16` (0.50x to 2.00x); "
        "on 1 CPU where bf16 is emulated, and fp32 alone is faster, 4.00x the speed under `bf16` (4.00x to 4.00x)."
    )


def test_a_page_without_a_place_for_figures() -> None:
    with pytest.raises(BenchError, match="no place for the figures; write <!-- figures"):
        script.with_figures("# mezzo", script.RESULTS)


def test_the_newest_of_each_workload_and_machine() -> None:
    old, new = result(date="2026-11-20T10:00:00+00:00"), result(date="2026-11-21T10:00:00+00:00")
    elsewhere, other = result(gpu="NVIDIA H200"), result("step")
    assert script.newest([other, new, elsewhere, old]) == [elsewhere, new, other]


def test_sizes_stand_beside_each_other(tmp_path: Path) -> None:
    """A second size of the same day is another file and another section; the same size again replaces its own."""
    small = result()
    large = dataclasses.replace(small, rooflines={"large": PointRoofline()}, date="2026-11-21T11:00:00+00:00")
    again = dataclasses.replace(small, date="2026-11-21T12:00:00+00:00")
    assert script.newest([small, large, again]) == [large, again]
    paths = [save(one, tmp_path)[0] for one in (small, large, again)]
    assert paths[0] == paths[2] != paths[1]
    assert load(paths[0]) == again and load(paths[1]) == large


def test_compiled_variants_measured_apart_stand_beside_the_others(tmp_path: Path) -> None:
    """A result of compiled variants alone takes no other's place, so that a workload can be measured in two parts."""
    eager = result()
    compiled = dataclasses.replace(
        eager, measurements=(measured("prepare+compile", 1.0),), date="2026-11-21T11:00:00+00:00"
    )
    assert script.newest([compiled, eager]) == [eager, compiled]
    paths = [save(one, tmp_path)[0] for one in (eager, compiled)]
    assert [load(path) for path in paths] == [eager, compiled]


def test_a_page(tmp_path: Path) -> None:
    stored, place = tmp_path / "results", tmp_path / "docs" / "performance.md"
    stored.mkdir()
    one, two = result(), result("step", gpu="NVIDIA H200")
    (stored / "a.json").write_text(one.to_json())
    (stored / "a.svg").touch()
    (stored / "b.json").write_text(two.to_json())
    text = script.page(stored, place)
    for part in (
        "## recipe\n\nLinear layers trained", "### X, 2 threads\n", "## step\n\nUnscaling", "### NVIDIA H200\n",
        script.markdown_table(one), "](../results/a.svg)", "commit abc, bf16.", "Tests of the timed code: 3 passed.",
    ):  # fmt: skip
        assert part in text
    assert "b.svg" not in text
    assert text.index("## recipe") < text.index("## step")


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, place, readme = tmp_path / "results", tmp_path / "docs" / "performance.md", tmp_path / "README.md"
    stored.mkdir()
    words = ["--results", str(stored), "--page", str(place), "--readme", str(readme)]
    readme.write_text(
        "<!-- speed: made by `python benchmarks/performance.py` --><!-- end of speed --> before "
        "<!-- figures: made by `python benchmarks/performance.py` -->\n<!-- end of figures --> after"
    )
    of_gpu = dataclasses.replace(result(gpu="NVIDIA H200"), measurements=(measured("prepare", 1.0),))
    (stored / "a.json").write_text(of_gpu.to_json())
    assert script.main([*words, "--check"]) == 1
    assert "run `python benchmarks/performance.py`" in capsys.readouterr().err
    assert script.main(words) == 0
    assert (
        "| workload | NVIDIA H200, eager |" in readme.read_text()
        and "-->No figures are stored yet.<!--" in readme.read_text()
    )
    assert "### NVIDIA H200\n" in place.read_text()
    assert script.main([*words, "--check"]) == 0
    (stored / "b.json").write_text(result().to_json())
    assert script.main([*words, "--check"]) == 1


@pytest.mark.parametrize("folder", ["typo", "empty", "page.md"])
@pytest.mark.parametrize("option", [(), ("--check",)])
def test_a_folder_without_results_empties_no_page(
    folder: str, option: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, readme = tmp_path / "page.md", tmp_path / "README.md"
    (tmp_path / "empty").mkdir()
    for path in (place, readme):
        path.write_text("mine")
    words = ["--results", str(tmp_path / folder), "--page", str(place), "--readme", str(readme), *option]
    with pytest.raises(SystemExit, match="2"):
        script.main(words)
    assert capsys.readouterr().err.endswith(
        f"error: there is no result of a benchmark in {tmp_path / folder}. Write --results with the folder of their JSON.\n"
    )
    assert place.read_text() == readme.read_text() == "mine"


def test_a_readme_that_was_named_and_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(result().to_json())
    place, typo = tmp_path / "page.md", tmp_path / "typo.md"
    with pytest.raises(SystemExit, match="2"):
        script.main(["--results", str(tmp_path), "--page", str(place), "--readme", str(typo)])
    assert f"No such file or directory: '{typo}'" in capsys.readouterr().err
    assert not place.exists()


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(BenchError, match=r"a\.json: not a benchmark result"):
        script.page(tmp_path, tmp_path / "p.md")


def test_a_result_of_a_workload_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(dataclasses.replace(result(), workload="alexnet").to_json())
    with pytest.raises(BenchError, match=r"a\.json: unknown workload 'alexnet'"):
        script.page(tmp_path, tmp_path / "p.md")


def test_rounds_that_say_another_thing_than_the_medians_are_a_tie() -> None:
    assert script.Comparison(ratio=0.95, ratios=(1.02, 1.05, 1.04)).outcome == "tie"
    assert script.Comparison(ratio=1.03, ratios=(0.9, 0.95, 0.97)).outcome == "tie"
    assert script.Comparison(ratio=1.03, ratios=(1.02, 1.05, 1.04)).outcome == "win"
    assert script.Comparison(ratio=0.97, ratios=(0.9, 0.95, 0.97)).outcome == "loss"
