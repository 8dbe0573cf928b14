"""Ranks decide as one: findings, sums, comparisons, and who is missing."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import hear, outcomes, run, tell
from torch import nn

from mezzo.distributed import RankConsensus, fully_shard, group
from mezzo.distributed.group import name_ranks
from mezzo.distributed.rank_consistency import checksum
from mezzo.errors import DistributedError

pytestmark = pytest.mark.distributed


def _combine(rank: int, world: int) -> list[tuple[list[float], list[float]]]:
    consensus = RankConsensus()
    cases = [
        (torch.zeros(3), torch.tensor([float(rank + 1)])),
        (torch.tensor([0.0, float(rank == world - 1), 0.0]), torch.tensor([2.0**rank])),
        (torch.tensor([float(rank == 0), torch.inf, -1.0]), torch.tensor([torch.inf if rank == 0 else 1.0])),
        (torch.zeros(1), torch.zeros(0)),
    ]
    return [tuple(part.tolist() for part in consensus.combine(*case)) for case in cases]


def test_what_one_rank_found_holds_for_all_and_squares_are_added() -> None:
    for found in run(4, _combine):
        assert found == [
            ([0.0, 0.0, 0.0], [10.0]),
            ([0.0, 1.0, 0.0], [15.0]),
            ([1.0, 1.0, 1.0], [float("inf")]),
            ([0.0], []),
        ]


def _part_of_a_group(rank: int, world: int) -> list[float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    consensus = RankConsensus(pairs[rank // 2])
    return consensus.combine(torch.tensor([float(rank == 3)]), torch.tensor([float(rank)]))[0].tolist()


def test_only_the_declared_group_takes_part() -> None:
    assert run(4, _part_of_a_group) == [[0.0], [0.0], [1.0], [1.0]]


def _audit(rank: int, world: int, fault: str, every: int, steps: int) -> tuple[int, str | None]:
    consensus = RankConsensus(every=every)
    params = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(2)}
    scale = torch.tensor(65536.0)
    for step in range(1, steps + 1):
        consensus.combine(torch.zeros(1), torch.zeros(0))
        if step == steps and rank == 1:
            if fault == "scale":
                scale = scale / 2
            if fault == "weight":
                params["b"][1] = 1.0078125  # the next bf16 value
                params["c"][0] = torch.nan
            if fault == "count":
                consensus.num_steps += 1
            if fault == "parameters":
                del params["c"]
        try:
            consensus.audit({"the loss scale": scale, "steps in a row": 0}, lambda: params)
        except DistributedError as error:
            return step, str(error)
    return steps, None


_COUNTS = "Load the same checkpoint, and call step() the same number of times, on all."
_DIFFERENCES = {
    "none": None,
    "scale": f"the loss scale is 65536 on ranks 0, 2; 32768 on rank 1. {_COUNTS}",
    "weight": (
        "the checksum of parameter 'b' (one of 2 that differ) is 000000000000be80 on ranks 0, 2; 000000000000be81 on rank 1. Their "
        "gradients were not averaged: end each no_sync() block before the step's last backward, and do not write "
        "weights on one rank only."
    ),
    "count": f"the number of steps is 2 on ranks 0, 2; 3 on rank 1. {_COUNTS}",
    "parameters": f"the number of parameters is 3 on ranks 0, 2; 2 on rank 1. {_COUNTS}",
}


@pytest.mark.parametrize("fault", _DIFFERENCES)
def test_a_difference_is_told_to_every_rank(fault: str) -> None:
    own_step = [2, 3 if fault == "count" else 2, 2]
    what = _DIFFERENCES[fault]
    wanted = [what and f"ranks disagree after step {step - 1}: {what}" for step in own_step]
    assert [text for _, text in run(3, _audit, fault, 1, 2)] == wanted


def test_comparisons_come_in_the_first_steps_and_then_every_so_often() -> None:
    assert run(2, _audit, "scale", 5, 4) == [(4, None)] * 2
    assert [step for step, text in run(2, _audit, "scale", 5, 5) if text] == [5, 5]
    assert run(2, _audit, "scale", 0, 2) == [(2, None)] * 2


def test_a_checksum_sees_every_bit() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.uint8):
        values = torch.zeros(3, 5, dtype=dtype)
        other = values.clone()
        other.view(torch.uint8).flatten()[-1] = 1
        assert checksum(values) != checksum(other)
        assert checksum(values.t()) == checksum(values)


def _lose(rank: int, world: int, how: str) -> tuple[str, float]:
    consensus = RankConsensus()
    consensus.combine(torch.zeros(1), torch.zeros(0))
    tell(f"{rank} is there")
    hear(*(f"{other} is there" for other in range(world)))
    # Half of it is what a busy machine may take to end a process.
    consensus.group.timeout = timedelta(seconds=20 if how == "ends" else 1)
    group._GRACE = timedelta(seconds=2)
    if rank == 1:
        if how == "ends":
            os._exit(3)
        hear("0 was told", "2 was told")
        return "hung", 0.0
    started = time.monotonic()
    try:
        consensus.combine(torch.zeros(1), torch.zeros(0))
    except DistributedError as error:
        tell(f"{rank} was told")
        return str(error), time.monotonic() - started
    return "nothing was noticed", 0.0


@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_a_lost_rank_is_named_within_the_timeout(how: str) -> None:
    found = outcomes(3, _lose, how)
    assert found[1].error == ("ended without an answer" if how == "ends" else None)
    for rank in (0, 2):
        message, seconds = found[rank].value
        if how == "ends":  # which closes its connections at once: nobody has waited
            assert message == (
                f"rank 1 ended, and rank {rank} waits for it. The output of rank 1 says why; if it holds no error, its batches ran "
                "out: give each rank as many batches (DistributedSampler, drop_last=True). Start again from the last checkpoint."
            )
        else:
            assert message == (
                f"rank 1 did not answer rank {rank} in 1 s: ended, or stuck. The output of rank 1 says why; start again from the "
                "last checkpoint."
            )
        assert seconds < 10


def _own_error(rank: int, world: int, what: str) -> str:
    consensus = RankConsensus()
    try:
        with consensus.watching():
            if what == "model":
                torch.ones(2) @ torch.ones(3)
            layer = nn.Linear(2, 2)
            fully_shard(layer, "fp32")
            layer.set_gradient_divide_factor(3.0)
            layer(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize(
    ("what", "said"), [("model", "inconsistent tensor size"), ("backend", "Cannot use ReduceOp.PREMUL_SUM with Gloo")]
)
def test_an_error_that_is_not_of_a_lost_rank_stays_what_it_is(what: str, said: str) -> None:
    for found in run(2, _own_error, what):
        assert found.startswith("RuntimeError: ") and said in found


def test_without_ranks_there_is_nothing_to_agree_on() -> None:
    with pytest.raises(DistributedError, match=r"torch\.distributed has none"):
        RankConsensus()


def test_ranks_in_words() -> None:
    assert [name_ranks(ranks) for ranks in ([3], [0, 1], [5, 1, 2, 3], [0, 2])] == [
        "rank 3", "ranks 0-1", "ranks 1-3, 5", "ranks 0, 2",
    ]  # fmt: skip
