"""What runs on a simulated accelerator: no wait on the healthy path, the CPU's bits, nothing read before it landed."""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch_versions import TORCH

from .names import CHECKS, GRAPH_CHECKS, OPTIMIZERS, PRESETS, RUNS, STEPS

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler to build the simulated accelerator with"
)
LOOPS = ("a_layer_norm_with_fp32_weights_is_three_launches", "a_layer_norm_by_triton_is_seen_by_a_trace")
OutputOnce = Callable[..., subprocess.CompletedProcess[str]]


PROGRAMS = ("program", "checks", *["graphs"] * hasattr(torch.accelerator, "Graph"))


def output_of(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums of several threads differ in their last bits
    module = f"tests.device.{program}".removesuffix(".")
    return subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, check=False, env=one_thread
    )


@pytest.fixture(scope="session")
def output_once(tmp_path_factory: pytest.TempPathFactory) -> OutputOnce:
    """What a program of this folder printed, and its errors; all are run once, for all workers of a test run."""
    own = tmp_path_factory.getbasetemp()
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "device.json"

    @functools.cache
    def all_programs() -> dict[str, Any]:
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                done = output_of("", *PROGRAMS)
                assert done.returncode == 0, done.stderr[-3000:]
                kept.write_text(done.stdout.splitlines()[-1], encoding="utf-8")
        return json.loads(kept.read_text(encoding="utf-8"))

    return lambda program: subprocess.CompletedProcess([program], *all_programs()[program])


@pytest.fixture(scope="session")
def runs(output_once: OutputOnce) -> dict[str, dict[str, Any]]:
    done = output_once("program")
    assert done.returncode == 0, done.stderr[-3000:]
    return {run["case"]: run for run in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", [*map(" ".join, RUNS)])
def test_a_healthy_step_never_waits_and_has_the_bits_of_the_cpu(case: str, runs: dict[str, dict[str, Any]]) -> None:
    run = runs[case]
    assert not run["stops"], "\n".join(run["stops"])
    if case.endswith("clip"):  # squares of a gradient are summed in another order by the CPU's kernel
        assert run["sim"] == pytest.approx(run["cpu"], rel=2.0**-20)
    else:
        assert run["sim"] == run["cpu"]
    assert not run["waits"], "\n".join(run["waits"])


@pytest.mark.parametrize("case", [" ".join(parts) for parts in itertools.product(PRESETS, OPTIMIZERS)])
def test_flags_that_land_late_are_waited_for_once_a_step(case: str, runs: dict[str, dict[str, Any]]) -> None:
    run = runs[f"{case} plain"]
    assert run["late"] == run["cpu"]
    assert 0 < len(run["late_waits"]) <= STEPS
    assert all(wait.startswith("wait: event") for wait in run["late_waits"])


@pytest.mark.parametrize("name", CHECKS)
def test_on_an_accelerator(name: str, output_once: OutputOnce) -> None:
    if TORCH < (2, 12) and name in LOOPS:
        pytest.skip("torch 2.11: the interpreter of its Triton cannot count a loop with the numpy of today")
    done = output_once("checks")
    assert f"held {name}\n" in done.stdout, done.stderr[-4000:]


@pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="torch 2.13 has the first graphs of any accelerator"
)
@pytest.mark.parametrize("name", GRAPH_CHECKS)
def test_of_captured_steps(name: str, output_once: OutputOnce) -> None:
    done = output_once("graphs")
    assert f"held {name}\n" in done.stdout, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="torch 2.13 has the first graphs of any accelerator"
)
def test_of_many_captured_steps() -> None:
    done = output_of("graphs", "many_replays_are_eager_steps")
    assert "held many_replays_are_eager_steps\n" in done.stdout, done.stderr[-4000:]


@pytest.mark.slow
def test_an_update_of_train_stops_for_its_record_and_in_transformers_alone() -> None:
    """For the loss that it writes down and the flags that move its schedule; transformers looks at the mask."""
    done = output_of("training")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # The CPU's update is another kernel, whose last bits reach the activations, which are bf16.
    assert found["sim"] == pytest.approx(found["cpu"], rel=2.0**-8)
    assert found["sim"][:2] == found["cpu"][:2]
    assert len(found["stops"]) >= 3
    for stops in found["stops"]:
        where = Counter(stop.rsplit("/", 1)[1].split(":")[0] for stop in stops)
        assert where <= Counter({"bind.py": 2, "result.py": 1, "train_step.py": 1}), stops
