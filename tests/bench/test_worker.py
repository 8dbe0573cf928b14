"""The worker: one point in memory at a time, seconds of the timed part alone, and a channel nothing else writes to."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from mezzo.bench.roofline import Phase
from mezzo.bench.variant import VARIANTS, Variant
from mezzo.bench.worker import VariantWorker, sampler_of
from mezzo.bench.workload import PEAK_RATES, Plan, Point, Session, Setting, Workload
from mezzo.errors import BenchError

PLAN = Plan(variants=("fp32",))


class Held:
    """Stands for a model: garbage once its session is dropped."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counting(Workload):
    """Says what was done to it."""

    log: ClassVar[list[str]] = []
    held: ClassVar[list[weakref.ref[Held]]] = []
    label: str = ""

    def points(self) -> tuple[Point, ...]:
        return tuple(Point(label=label, workload=dataclasses.replace(self, label=label)) for label in "ab")

    def load(self) -> None:
        self.log.append(f"load {self.label}")

    def build(self, variant: Variant, setting: Setting) -> Session:
        self.log.append(f"build {self.label} in {variant.name}")
        held = Held()
        self.held.append(weakref.ref(held))

        def run() -> Tensor:
            self.log.append(f"run {self.label}")
            assert held
            return torch.tensor(0.5)

        return Session(
            warm_up=lambda: self.log.append(f"warm up {self.label}"), run=run, units=3, data_bytes=7,
            own_seconds=(lambda: 42.0) if self.label == "b" else None, measures=lambda: {"runs": float(len(self.log))},
        )  # fmt: skip

    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        return ()

    @classmethod
    def for_device(cls, device: torch.device) -> Counting:
        return cls()

    @classmethod
    def default_variants(cls, device: torch.device) -> tuple[str, ...]:
        return ("fp32",)


class Hungry(Counting):
    def is_resident(self, device: torch.device) -> bool:
        return False


@pytest.fixture(autouse=True)
def forget() -> None:
    Counting.log.clear()
    Counting.held.clear()


def test_a_point_is_built_and_warmed_up_once_and_dropped_for_the_next() -> None:
    worker = VariantWorker(Counting(), VARIANTS["fp32"], PLAN.setting)
    worker.sample("a")
    worker.sample("a")
    assert Counting.log == ["load a", "build a in fp32", "warm up a", "run a", "run a"]
    assert Counting.held[0]() is not None
    worker.sample("b")
    assert Counting.log[5:] == ["load b", "build b in fp32", "warm up b", "run b"]
    assert Counting.held[0]() is None


@pytest.mark.slow
def test_what_fills_memory_is_dropped_after_each_sample() -> None:
    worker = VariantWorker(Hungry(), VARIANTS["fp32"], PLAN.setting)
    worker.sample("a")
    assert Counting.held[0]() is None
    worker.sample("a")
    assert Counting.log == ["load a", "build a in fp32", "warm up a", "run a"] * 2


def test_a_sample() -> None:
    worker = VariantWorker(Counting(), VARIANTS["fp32"], PLAN.setting)
    first, own = worker.sample("a"), worker.sample("b")
    assert 0 < first["seconds"] < 42.0
    assert own["seconds"] == 42.0
    assert {name: first[name] for name in ("loss", "units", "data_bytes", "measures")} == {
        "loss": 0.5, "units": 3, "data_bytes": 7, "measures": {"runs": 4.0},
    }  # fmt: skip
    assert json.loads(json.dumps(first)) == first


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "imports", ("no_such_library.part",))
    with pytest.raises(BenchError, match="this workload needs no_such_library; pip install"):
        VariantWorker(Counting(), VARIANTS["fp32"], PLAN.setting)


def test_a_job_for_the_machine_measures_it() -> None:
    plan = dataclasses.asdict(Plan(variants=("torch-amp",), peak_rates_s=0.05))
    found = sampler_of({"plan": plan, "variant": PEAK_RATES, "workload": "recipe", "config": {}})("any")
    assert list(found["matmul"]) == ["fp32", "bf16"]


def test_memory_that_cannot_be_kept_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    job = {"plan": {"variants": ["prepare+keep"]}, "variant": "prepare+keep", "workload": "recipe", "config": {}}
    with pytest.raises(BenchError, match=r"^memory cannot be kept here: .*\. Leave the variants with \+keep out\.$"):
        sampler_of(job)


def test_mezzo_keeps_memory_by_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    is_kept = SimpleNamespace(is_kept=True)
    monkeypatch.setattr("mezzo.bench.worker.keep_memory", lambda: called.append("kept") or is_kept)
    for variant in ("prepare", "torch-amp+keep", "prepare-master+keep"):
        called.append(variant)
        sampler_of({"plan": {"variants": [variant]}, "variant": variant, "workload": "recipe", "config": {}})
    assert called == ["prepare", "torch-amp+keep", "prepare-master+keep", "kept"]


def test_what_libraries_print_does_not_reach_the_channel() -> None:
    code = (
        "import os, sys; from mezzo.bench.worker import _take_standard_output; channel = _take_standard_output();"
        "print('noise'); os.system('echo more noise'); print('answer', file=channel, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "answer\n"
    assert "noise" in done.stderr
    assert "more noise" in done.stderr
