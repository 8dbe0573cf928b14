"""Ranks that do not average the same backward passes, or shard otherwise, are told so on all: none is ended by gloo."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from tests.distributed.ranks import outcomes, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.errors import MezzoError

pytestmark = pytest.mark.distributed

APART = "all are there now: they do not take part in the same collectives in the same order. Call forward, backward and step as often on every rank, open no_sync()"


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def _copies(rank: int, world: int, policy: str, case: str) -> str:
    """Two micro-batches a step, of which rank 1 averages others than the rest, or skips one, in the fifth step."""
    net = _net()
    amp = mezzo.prepare(net, mezzo.optim.AdamW(net.parameters(), lr=0.05), policy)
    ddp = DistributedDataParallel(amp.model)
    assert amp.consensus is not None
    amp.consensus.group.timeout = timedelta(seconds=3)
    try:
        for step in range(6):
            is_other = step == 4 and rank == 1
            for part in range(1 if is_other and case == "skips one" else 2):
                waits = {"averages none": True, "averages both": False}.get(case, part == 0) if is_other else part == 0
                with ddp.no_sync() if waits else nullcontext():
                    amp.backward(ddp(torch.ones(4, 6)).float().square().mean())
            amp.step()
            amp.zero_grad()
    except MezzoError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("world", "policy", "case"),
    [
        (2, "bf16-master", "averages none"),
        (2, "fp32", "averages both"),
        pytest.param(2, "bf16", "skips one", marks=pytest.mark.slow),
        pytest.param(3, "fp32, reduce=bf16", "averages none", marks=pytest.mark.slow),
    ],
)
def test_copies_that_average_other_backward_passes_are_told_on_all_ranks(world: int, policy: str, case: str) -> None:
    for outcome in outcomes(world, _copies, policy, case):
        assert outcome.error is None and APART in outcome.value, outcome


def _shards(rank: int, world: int) -> str:
    net = _net()
    mezzo.distributed.fully_shard(net, "fp32")
    amp = mezzo.prepare(net, mezzo.optim.AdamW(net.parameters(), lr=0.05), "fp32")
    assert amp.consensus is not None
    amp.consensus.group.timeout = timedelta(seconds=3)
    try:
        for step in range(3):
            for _ in range(1 if step == 1 and rank == 1 else 2):
                amp.backward(net(torch.ones(4, 6)).square().mean())
            amp.step()
            amp.zero_grad()
    except MezzoError as error:
        return str(error)
    return "trained"


@pytest.mark.slow  # a gather of torch's waits for the limit of the process group, 30 s
def test_a_rank_that_skips_a_micro_batch_of_shards_ends_no_other() -> None:
    first, second = outcomes(2, _shards)
    assert first.error is None and APART in first.value
    assert second.error is None and "did not answer rank 1 in 3 s: ended, or stuck." in second.value


def _shards_by(rank: int, world: int, case: str) -> str:
    net, policies = _net(), {"policy": ["bf16", "fp32"], "ops": ["bf16", "bf16-master"]}.get(case, ["bf16", "bf16"])
    units = [net[0]] if case == "units" and rank == 1 else []
    try:
        mezzo.distributed.fully_shard(net, policies[rank], units=units)
    except MezzoError as error:
        return str(error)
    return "sharded"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("policy", "the policy 'bf16' on rank 0; the policy 'fp32' on rank 1"),
        ("ops", "the policy 'bf16' on rank 0; the policy 'bf16-master' on rank 1"),
        ("units", "weights stored in fp32, gathered in bf16: 0 on rank 1"),
    ],
)
def test_ranks_that_shard_otherwise_are_told_before_they_gather(case: str, said: str) -> None:
    first, second = run(2, _shards_by, case)
    assert first == second and first.startswith("ranks cannot train together: fully_shard goes by "), first
    assert said in first and first.endswith("Call fully_shard with one policy, model and units on all ranks.")
    assert run(2, _shards_by, "equal") == ["sharded"] * 2
