"""The harness: interleaved rounds, fresh processes, every sample kept, errors that say which variant and why."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.bench import Plan, Result, harness, measure
from mezzo.bench.harness import WorkerProcess, check_memory, environment_of, schedule
from mezzo.bench.measurement import from_json
from mezzo.bench.workload import PEAK_RATES, Workload
from mezzo.bench.workloads.bert import Overhead, Reviews
from mezzo.bench.workloads.inference import Inference
from mezzo.bench.workloads.recipe import Recipe
from mezzo.errors import BenchError

SMALL = Recipe(batch_size=8, in_size=16, out_size=4, num_layers=3, num_batches=2, epochs=2)
VARIANTS = ("fp32", "torch-amp")
NAMES = st.lists(st.text("abc", min_size=1), min_size=1, max_size=4, unique=True)


def job(variant: str, **config: int) -> dict[str, object]:
    plan = {"variants": ["fp32"], "threads": 1, "peak_rates_s": 0.05}
    return {"workload": "recipe", "variant": variant, "config": config, "plan": plan}


@given(points=NAMES, variants=NAMES, rounds=st.integers(1, 5))
def test_rounds_are_interleaved(points: list[str], variants: list[str], rounds: int) -> None:
    order = list(schedule(points, variants, rounds))
    assert len(set(order)) == len(order) == len(points) * len(variants) * rounds
    assert [point for point, _, _ in order] == [p for p in points for _ in range(rounds * len(variants))]
    for start in range(0, len(order), len(variants)):
        one_round = order[start : start + len(variants)]
        assert [variant for _, _, variant in one_round] == variants
        assert len({(point, number) for point, number, _ in one_round}) == 1


@pytest.fixture(scope="module")
def timed() -> tuple[Result, list[tuple[str, int, int]]]:
    told: list[tuple[str, int, int]] = []
    plan = Plan(variants=VARIANTS, rounds=2, threads=1, peak_rates_s=0.05)
    result = measure(SMALL, plan, tests="12 passed", progress=lambda *said: told.append(said))
    return result, told


def test_every_sample_is_kept(timed: tuple[Result, list[tuple[str, int, int]]]) -> None:
    result, told = timed
    label = SMALL.points()[0].label
    assert [what for what, _, _ in told] == [f"{label}: {name}" for name in (*VARIANTS, PEAK_RATES)] * 2
    assert [(done, total) for _, done, total in told] == [(i, 6) for i in range(6)]
    assert [m.variant for m in result.measurements] == list(VARIANTS)
    for m in result.measurements:
        assert len(m.seconds) == 2
        assert min(m.seconds) > 0
        assert m.units == SMALL.epochs * SMALL.num_batches
        assert m.peak_bytes > 0
        assert m.data_bytes == SMALL.num_batches * SMALL.batch_size * (SMALL.in_size + SMALL.out_size) * 4


def test_a_result_says_what_it_was_taken_on(timed: tuple[Result, list[tuple[str, int, int]]]) -> None:
    result, _ = timed
    assert result.workload == "recipe"
    assert result.tests == "12 passed"
    assert result.machine["threads"] == 1
    assert result.machine["versions"]["torch"]
    assert result.plan["variants"] == list(VARIANTS)
    assert result.config == {
        "batch_size": 8, "in_size": 16, "out_size": 4, "num_layers": 3, "num_batches": 2, "epochs": 2, "lr": 1e-3,
    }  # fmt: skip
    assert set(result.peak_rates.matmul) == {"fp32", "bf16"}
    assert from_json(result.to_json()) == result


@pytest.mark.parametrize(
    ("workload", "variant", "said"),
    [
        (SMALL, "torch-16bit", r"recipe, 8 x 16 x 3: it keeps nothing in fp32.*Write prepare-master"),
        (
            Overhead(),
            "accelerate+compile",
            r"overhead, eval: it is a way to train; for inference write torch-autocast\.",
        ),
        (Overhead(modes=("train",)), "torch-16bit", r"overhead, train: it keeps nothing in fp32"),
        (Inference(), "fabric", r"inference, .*it is a way to train"),
        (Reviews(), "prepare", r"reviews, .*the training system runs as fp32 or mezzo-amp; name one of them\."),
    ],
)
def test_a_variant_that_cannot_do_it_is_refused_before_anything_runs(
    workload: Workload, variant: str, said: str
) -> None:
    told: list[str] = []
    plan = Plan(variants=("fp32", variant), rounds=1)
    with pytest.raises(BenchError, match=rf"^variant {re.escape(variant)} does not run in {said}"):
        measure(workload, plan, progress=lambda what, *_: told.append(what))
    assert told == []


def test_one_more_variant_needs_the_memory_that_another_took() -> None:
    for peaks, free in (([], 0), ([5, 3], 5), ([5, 3], None)):
        check_memory("fp32", peaks, free)
    with pytest.raises(
        BenchError, match=r"3\.0 GiB of memory are left for variant fp32 beside 2 others.* takes 5\.0: name fewer"
    ):
        check_memory("fp32", [5 * 2**30, 2**30], 3 * 2**30)


@pytest.mark.slow
def test_variants_are_built_only_where_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(harness, "free_memory_bytes", lambda: 1)
    plan = Plan(variants=VARIANTS, rounds=1, threads=1, peak_rates_s=0.05)
    said = r"0\.0 GiB of memory are left for variant torch-amp beside 1 others.*name fewer with --variants"
    with pytest.raises(BenchError, match=said):
        measure(SMALL, plan, progress=lambda what, *_: told.append(what))
    assert len(told) == 2  # the first variant has the machine for itself


def test_the_loss_is_that_of_the_last_round(timed: tuple[Result, list[tuple[str, int, int]]]) -> None:
    import torch

    from mezzo.bench.variant import VARIANTS as BY_NAME
    from mezzo.bench.workload import Setting

    result, _ = timed
    session = SMALL.build(BY_NAME["fp32"], Setting(device=torch.device("cpu"), dtype=torch.bfloat16))
    session.warm_up()
    session.run()
    assert result.at(SMALL.points()[0].label)["fp32"].loss == session.run().item()


@pytest.mark.slow  # what cannot be kept, and the settings of each variant, are in the quick suite
def test_memory_is_kept_as_each_library_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment for those that know no call for it; mezzo's processes call mezzo."""
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    names = ("torch-amp+keep", "fabric+keep+compile", "torch-amp", "prepare+keep", "mezzo-amp+keep", PEAK_RATES)
    assert [name for name in names if environment_of(name) != dict(os.environ)] == [
        "torch-amp+keep", "fabric+keep+compile",
    ]  # fmt: skip
    assert environment_of("torch-amp+keep")["MALLOC_MMAP_MAX_"] == "0"
    assert environment_of("fp32", Path("/elsewhere/src"))["PYTHONPATH"] == "/elsewhere/src"


def test_an_error_in_a_variant_is_one_sentence_with_its_log() -> None:
    with WorkerProcess(job("fp32", batch_size=8, in_size=10**8)) as worker:
        worker.receive()
        with pytest.raises(
            BenchError, match=r"^variant fp32 failed: RuntimeError: .*allocate.* \(full log: .*\)$"
        ) as caught:
            worker.ask("8 x 100000000 x 3")
    assert "\n" not in str(caught.value)
    log = Path(str(caught.value).split("full log: ")[1].rstrip(")"))
    assert "Traceback" in log.read_text()
    log.unlink()


@pytest.mark.slow
def test_a_killed_process_is_told_from_an_error() -> None:
    with WorkerProcess(job("fp32")) as worker:
        worker.receive()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(BenchError, match="variant fp32 failed: the process was killed, as the system does"):
            worker.ask("any")
    worker.log.unlink()


def test_a_process_leaves_nothing_behind() -> None:
    with WorkerProcess(job(PEAK_RATES)) as worker:
        pid, log = worker.pid, worker.log
        assert json.dumps(worker.receive()) == '{"threads": 1}'
        assert log.exists()
    assert not log.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_busy_process_is_not_waited_for() -> None:
    with WorkerProcess(job("fp32", batch_size=8, in_size=16, out_size=4, num_batches=1, epochs=10**5)) as worker:
        worker.receive()
        worker.send("8 x 16 x 3")
    assert worker.exit_code == -signal.SIGKILL
