"""Whole programs as strangers write them: three lines differ from fp32, none raises, and the losses are those of fp32."""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module

import pytest
import torch
from tests.loops.swap import PROGRAMS, Fp32, Prepare

import mezzo

for part in ("agents", "indices", "sequences", "vision"):
    import_module(f"tests.loops.{part}")
pytestmark = [  # in fp32, by torch itself
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
EPS = torch.finfo(torch.bfloat16).eps


def prepare(policy: str | None) -> Prepare:
    return Fp32 if policy is None else lambda model, optimizer: mezzo.prepare(model, optimizer, policy)


def run(name: str, policy: str | None, steps: int, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    losses = PROGRAMS[name](prepare(policy), steps)
    assert all(map(math.isfinite, losses))
    return losses


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_losses_are_those_of_fp32(name: str) -> None:
    wanted = run(name, None, 4)
    for policy in ("bf16", "bf16-master", "fp16, scaling.init_scale=16"):
        for found, loss in zip(run(name, policy, 4), wanted, strict=True):
            assert abs(found - loss) <= 8 * EPS * max(1.0, abs(loss)), policy


@cache
def fp32_ends(name: str) -> list[float]:
    """Mean of the last ten of 60 losses in fp32, for three seeds."""
    return [sum(run(name, None, 60, seed)[-10:]) / 10 for seed in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_within_the_spread_of_three_seeds(name: str, policy: str) -> None:
    ends, found = fp32_ends(name), sum(run(name, policy, 60)[-10:]) / 10
    margin = max(max(ends) - min(ends), 8 * EPS * max(1.0, abs(ends[0])))
    assert min(abs(found - end) for end in ends) <= margin
