"""`mezzo bench`: from the command line to table, JSON and picture."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest
import torch

from mezzo.bench import Plan, Result, load
from mezzo.bench.workload import WORKLOADS, find_workload
from mezzo.bench.workloads.recipe import Recipe
from mezzo.cli import bench as cli_bench
from mezzo.cli import main
from mezzo.cli.bench import parse
from mezzo.errors import BenchError

TINY = "--batch-size 8 --in-size 16 --out-size 4 --num-batches 2 --epochs 1 --rounds 1 --peak-rates-s 0.05".split()


WORDS = ["bench", "recipe", "--device", "cpu", "--variants", "fp32", "torch-amp", "--no-check", *TINY]


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Result:
    """Run the command, and return the result that it wrote, which its table shows."""
    assert main([*WORDS, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    data, picture = (next(tmp_path.glob(f"recipe_*.{kind}")) for kind in ("json", "svg"))
    assert text.splitlines()[-2:] == [str(data), str(picture)]
    result = load(data)
    for m in result.measurements:
        assert f"{m.loss:.6g}" in text
    return result


@pytest.mark.slow  # tests/bench/test_harness.py starts such processes in the quick suite
def test_what_is_measured_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = shown(tmp_path, capsys)
    assert [m.variant for m in result.measurements] == ["fp32", "torch-amp"]
    assert result.tests == "not run: --no-check"


def test_table_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load(next((Path(__file__).parents[2] / "benchmarks" / "results").glob("recipe_*.json")))
    monkeypatch.setattr("mezzo.cli.bench.measured", lambda *_: stored)
    assert shown(tmp_path, capsys) == stored
    assert main([*WORDS, "--json", "--out", str(tmp_path / "again")]) == 0
    out, data = capsys.readouterr().out, next(tmp_path.glob("recipe_*.json"))
    assert out == data.read_text() == next((tmp_path / "again").glob("*.json")).read_text()
    assert json.loads(out)["plan"]["variants"] == list(stored.plan["variants"])


def stored_one() -> Result:
    return load(next((Path(__file__).parents[2] / "benchmarks" / "results").glob("recipe_*.json")))


def test_a_result_that_cannot_be_saved_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mezzo.cli.bench.measured", lambda *_: stored_one())
    monkeypatch.setattr("mezzo.files.move_into_place", full)
    assert main([*WORDS, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "torch-amp" in said.out and f"{tmp_path}/recipe_" in said.err
    assert list(tmp_path.iterdir()) == []  # whole or not at all


def test_a_result_that_cannot_be_printed_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mezzo.cli.bench.measured", lambda *_: stored_one())
    monkeypatch.setattr("mezzo.cli.bench.print_result", closed)
    assert main([*WORDS, "--out", str(tmp_path)]) == 2
    assert load(next(tmp_path.glob("*.json"))) == stored_one()


@pytest.mark.parametrize("content", [b"{}", b"\xff", b"[" * 100_000, b"[1]"])
def test_a_file_of_the_same_name_that_is_no_result_is_kept(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mezzo.cli.bench.measured", lambda *_: stored_one())
    assert main([*WORDS, "--out", str(tmp_path)]) == 0
    (first,) = tmp_path.glob("*.json")
    first.write_bytes(content)
    assert main([*WORDS, "--out", str(tmp_path)]) == 0
    assert first.read_bytes() == content and load(first.with_stem(f"{first.stem}_2")) == stored_one()


def test_a_quick_look_is_one_at_a_small_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[object, Plan]] = []
    monkeypatch.setattr("mezzo.cli.bench.measured", lambda workload, plan, _: seen.append((workload, plan)) or 1 / 0)
    for name in WORKLOADS:
        with pytest.raises(ZeroDivisionError):
            main(["bench", name, "--device", "cpu", "--quick", "--rounds", "1", "--no-check", "--out", str(tmp_path)])
        asked, plan = seen.pop()
        assert asked == find_workload(name).for_device(torch.device("cpu")).quick()
        assert plan.rounds == 1


def test_a_number_that_is_written_is_that_of_a_quick_look_too() -> None:
    _, _, workload = parse("recipe", ["--device", "cpu", "--quick", "--epochs", "7"])
    assert workload == dataclasses.replace(Recipe().quick(), epochs=7)


def test_each_test_path_runs_once_for_all_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("mezzo.cli.bench.run_tests", lambda paths: ran.extend(paths) or "1 passed")
    cli_bench._tested.cache_clear()
    said = [cli_bench.tests_of(find_workload(name).for_device(torch.device("cpu"))) for name in WORKLOADS]
    cli_bench._tested.cache_clear()
    assert sorted(ran) == sorted({path for name in WORKLOADS for path in find_workload(name).tests})
    assert said[0].split("; ") == [f"{path} 1 passed" for path in Recipe.tests]


def test_red_tests_stop_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def red(paths: object) -> str:
        raise BenchError("the tests of what would be timed do not pass")

    monkeypatch.setattr("mezzo.cli.bench.run_tests", red)  # tests/bench/test_gate.py runs red ones
    monkeypatch.setattr("mezzo.cli.bench.measured", lambda *_: pytest.fail("timed on red"))
    cli_bench._tested.cache_clear()
    assert main(["bench", "recipe", "--device", "cpu"]) == 2
    assert "the tests of what would be timed do not pass" in capsys.readouterr().err


def test_every_number_is_an_option() -> None:
    options, plan, workload = parse(
        "recipe",
        "--device cpu --batch-size 1 --in-size 2 --out-size 3 --num-layers 4 --num-batches 5 --epochs 6 --lr 0.5 "
        "--rounds 7 --dtype fp16 --threads 8 --seed 9 --peak-rates-s 0.25 --variants fp32".split(),
    )
    assert workload == Recipe(batch_size=1, in_size=2, out_size=3, num_layers=4, num_batches=5, epochs=6, lr=0.5)
    assert options.check
    assert (plan.rounds, plan.dtype, plan.threads, plan.seed, plan.peak_rates_s) == (7, "fp16", 8, 9, 0.25)
    assert plan.variants == ("fp32",)


def test_defaults_are_those_of_the_device() -> None:
    _, plan, workload = parse("recipe", ["--device", "cpu"])
    assert workload == Recipe.for_device(torch.device("cpu"))
    assert plan.variants == Recipe.default_variants(torch.device("cpu"))
    published = Recipe.for_device(torch.device("cuda"))
    assert published == Recipe()
    assert (published.batch_size, published.in_size, published.out_size, published.num_layers) == (512, 4096, 4096, 3)
    assert (published.num_batches, published.epochs, published.lr) == (50, 3, 1e-3)


def test_usage_names_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*WORKLOADS, "all"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipes"], "mezzo bench: unknown workload 'recipes'. Did you mean 'recipe'?"),
        (["nope"], f"mezzo bench: unknown workload 'nope'. Valid: {', '.join(sorted([*WORKLOADS, 'all']))}."),
        (["recipe", "--variants", "torch-apm"], "mezzo bench: unknown variant 'torch-apm'. Did you mean 'torch-amp'?"),
        (["recipe", "--rounds", "0"], "mezzo bench: --rounds 0 measures nothing; write 1 or more."),
        (["recipe", "--device", "gpu"], "mezzo bench: --device gpu is not a torch device; write cpu or cuda."),
        (["recipe", "--dtype", "bf17"], "mezzo bench: --dtype bf17 is not a 16-bit dtype; write bf16 or fp16."),
        (
            ["recipe", "--variants", "fp32", "torch-amp", "fp32"],
            "mezzo bench: --variants names fp32 twice; write it once.",
        ),
        (["scaling", "--widths", "8", "16", "8"], "mezzo bench: --widths names 8 twice; write it once."),
        (["recipe", "--batch-size", "0"], "mezzo bench: --batch-size 0: sizes and counts start at 1."),
        (
            ["all", "--variants", "torch-16bit"],
            "mezzo bench: variant torch-16bit does not run in recipe, 512 x 2048 x 3: ",
        ),
    ],
)
def test_bad_options_are_refused_before_the_tests_are_run(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mezzo.cli.bench.tests_of", lambda _: pytest.fail("work was done"))
    monkeypatch.setattr("mezzo.cli.bench.open_folder", lambda _: None)
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(message) and said.count("\n") == 1


def test_an_option_that_one_of_all_workloads_lacks_stops_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mezzo.cli.bench.measured", lambda *_: pytest.fail("work was done"))
    with pytest.raises(SystemExit):
        main(["bench", "all", "--no-check", "--device", "cpu", "--in-size", "16"])
    assert "--in-size" in capsys.readouterr().err


def test_an_option_without_its_value_is_the_commands_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "recipe", "--device"])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "--device" in said and "mezzo bench recipe --help" in said


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "recipe", "--batchsize", "3"])
    assert caught.value.code == 2
    assert "--batch-size" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_json_of_all_workloads_is_one_document(
    fails: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(workload: object, plan: Plan, tests: str) -> Result:
        name = next(name for name in WORKLOADS if isinstance(workload, find_workload(name)))
        if fails and name == last:
            raise BenchError("a variant failed")
        return dataclasses.replace(stored_one(), workload=name)

    *_, last = WORKLOADS
    monkeypatch.setattr("mezzo.cli.bench.measured", measured)
    words = ["--device", "cpu", "--quick", "--no-check", "--json", "--out", str(tmp_path)]
    assert main(["bench", "all", *words]) == 2 * fails
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [name for name in WORKLOADS if not fails or name != last]
    assert {name: one["workload"] for name, one in found.items()} == {name: name for name in found}
    assert found["recipe"] == json.loads(dataclasses.replace(stored_one(), workload="recipe").to_json())
