"""A plan refuses what cannot be measured before any process is started."""

from __future__ import annotations

import math

import pytest
import torch

from mezzo.bench.variant import VARIANTS, find_variant, those_that_run
from mezzo.bench.workload import WORKLOADS, Plan, Workload, find_workload
from mezzo.errors import BenchError, MezzoError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 0}, "--rounds 0 measures nothing; write 1 or more."),
        ({"threads": -1}, "--threads -1 are none; write 1 or more, or 0 for torch's own choice."),
        ({"threads": 2**40}, f"--threads {2**40} are none; write 1 or more, or 0 for torch's own choice."),
        ({"seed": -1}, "--seed -1 is none; write a whole number from 0 on, below 2^63."),
        ({"peak_rates_s": math.nan}, "--peak-rates-s nan measures nothing; write a number of seconds above 0."),
        ({"peak_rates_s": 0.0}, "--peak-rates-s 0.0 measures nothing; write a number of seconds above 0."),
        ({"variants": ()}, "no variant was named; write --variants fp32 torch-amp, or leave the option out."),
        ({"variants": ("torch-apm",)}, "unknown variant 'torch-apm'. Did you mean 'torch-amp'?"),
        (
            {"variants": ("tf32",)},
            "variant tf32 cannot run here: tf32 is a format of CUDA devices, and this one is cpu.",
        ),
        (
            {"variants": ("prepare+capture",)},
            "variant prepare+capture cannot run here: a step is captured as a CUDA graph, and this device is cpu.",
        ),
        ({"dtype": "fp32"}, "--dtype fp32 is not a 16-bit dtype; write bf16 or fp16."),
        ({"dtype": "bf61"}, "--dtype bf61 is not a 16-bit dtype; write bf16 or fp16."),
        ({"device": "gpu"}, "--device gpu is not a torch device; write cpu or cuda."),
    ],
)
def test_bad_plans(change: dict[str, object], message: str) -> None:
    with pytest.raises(MezzoError) as caught:
        Plan(**{"variants": ("fp32",), **change})
    assert str(caught.value) == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(BenchError, match="--device cuda was asked for, but this torch sees no CUDA device"):
        Plan(variants=("fp32",), device="cuda")


def test_formats_of_a_plan() -> None:
    assert Plan(variants=("torch-amp", "fp32", "torch-autocast")).number_formats == ("bf16", "fp32")
    assert Plan(variants=("torch-amp",), dtype="fp16").number_formats == ("fp16",)
    assert VARIANTS["tf32"].number_format(torch.bfloat16) == "tf32"


def test_variants_know_what_they_miss() -> None:
    assert those_that_run(("fp32", "tf32", "torch-amp"), CPU) == ("fp32", "torch-amp")
    assert those_that_run(("tf32",), torch.device("cuda")) == ("tf32",)
    assert find_variant("torch-amp+compile", CPU).compiled
    assert not find_variant("torch-amp", CPU).compiled


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_workload_has_defaults_that_exist(name: str, device: str) -> None:
    kind = find_workload(name)
    at = torch.device(device)
    assert issubclass(kind, Workload)
    assert set(kind.default_variants(at)) <= set(VARIANTS)
    points = kind.for_device(at).points()
    assert len({point.label for point in points}) == len(points) > 0


def test_unknown_workload() -> None:
    with pytest.raises(BenchError, match=r"unknown workload 'recipee'\. Did you mean 'recipe'\?"):
        find_workload("recipee")
