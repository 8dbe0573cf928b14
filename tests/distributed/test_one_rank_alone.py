"""What one rank alone does between steps, or does otherwise in one, is told in that step, to all; what all do is no news."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.distributed.ranks import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import consensus
from mezzo.errors import MezzoError

pytestmark = pytest.mark.distributed

SEEN = 5
"""Steps before, of which the first three are compared anyway."""


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def _prepared(policy: str) -> tuple[mezzo.Stepper, nn.Module]:
    net = _net()
    master = mezzo.Policy.parse(policy).master
    amp = mezzo.prepare(net, mezzo.optim.AdamW(net.parameters(), lr=0.05, master=master), policy)
    return amp, DistributedDataParallel(amp.model)


def _step(amp: mezzo.Stepper, ddp: nn.Module, rank: int, number: int, **how: float) -> None:
    amp.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    amp.backward((ddp(x).float() - x.sum(1, keepdim=True)).square().mean())
    amp.step(**how)


def _write(amp: mezzo.Stepper, ddp: nn.Module, what: str, rank: int, before: dict[str, object]) -> None:
    weight = next(amp.model.parameters())
    if what == "load":
        amp.load_state_dict(before)
    elif what == "load weights":
        amp.model.load_state_dict(before["model"])
    elif what == "load the optimizer's":
        amp.optimizers[0].load_state_dict(before["optimizers"][0])  # type: ignore[index]
    elif what == "write":
        with torch.no_grad():
            weight.add_(0.125)
    elif what == "write past versions":
        for p in amp.model.parameters():
            p.data.mul_(2)
    elif what == "write one past versions":
        weight.data.view(-1)[-1].mul_(2)


def _late(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function as on an accelerator, whose answers the host reads when the next step begins."""
    with mock.patch.object(consensus, "host_decides", lambda device: False):
        return fn(*args)


def _alone_late(*args: Any) -> tuple[int, str]:
    return _late(_alone, *args)


def _called_late(*args: Any) -> tuple[int, str, bool]:
    return _late(_called, *args)


def _alone(rank: int, world: int, policy: str, what: str, who: int | None) -> tuple[int, str]:
    amp, ddp = _prepared(policy)
    for number in range(2):
        _step(amp, ddp, rank, number)
    before = _copied(amp.state_dict())
    for number in range(2, SEEN):
        _step(amp, ddp, rank, number)
    if who in (None, rank):
        _write(amp, ddp, what, rank, before)
    for number in range(SEEN, SEEN + 4):
        try:
            _step(amp, ddp, rank, number)
        except MezzoError as error:
            return number + 1, str(error)
    return 0, "trained"


def _copied(state: object) -> object:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: _copied(v) for k, v in state.items()}
    return [_copied(v) for v in state] if isinstance(state, list) else state


@pytest.mark.parametrize("policy", ["fp32", "bf16-master", "fp16, scaling.init_scale=256"])
@pytest.mark.parametrize("what", ["load", "load weights", "load the optimizer's", "write"])
def test_what_one_rank_loads_or_writes_is_told_in_the_next_step(policy: str, what: str) -> None:
    for step, said in run(2, _alone, policy, what, 0):
        assert step == SEEN + 1 and said.startswith(f"ranks disagree after step {SEEN}: "), said
        assert "on rank 0; " in said and ("one rank only." in said or "Load the same checkpoint" in said)


@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
def test_what_one_rank_writes_past_versions_is_told_when_the_turn_of_a_written_weight_comes(policy: str) -> None:
    for step, said in run(2, _alone, policy, "write past versions", 1):
        assert step == SEEN + 1 and said.startswith(f"ranks disagree after step {SEEN}: "), said
    for step, said in run(2, _alone, policy, "write one past versions", 1):
        assert SEEN < step <= SEEN + 4 and "of parameter '0.weight'" in said, said


@pytest.mark.parametrize("what", ["load", "load weights", "load the optimizer's", "write", "write past versions"])
def test_what_all_ranks_load_or_write_is_no_news(what: str) -> None:
    assert run(2, _alone, "bf16-master", what, None) == [(0, "trained")] * 2


def _sharded(rank: int, world: int, who: int | None) -> tuple[int, str]:
    net = _net()
    mezzo.distributed.fully_shard(net, "fp32")
    amp = mezzo.prepare(net, mezzo.optim.AdamW(net.parameters(), lr=0.05), "fp32")
    _step(amp, net, rank, 0)
    before = _copied(amp.state_dict())
    for number in range(1, SEEN):
        _step(amp, net, rank, number)
    if who in (None, rank):
        amp.load_state_dict(before)
    try:
        _step(amp, net, rank, SEEN)
    except MezzoError as error:
        return SEEN + 1, str(error)
    return 0, "trained"


def test_shards_that_one_rank_loads_are_told_too() -> None:
    wanted = (
        f"ranks disagree after step {SEEN}: the number of loads is 1 on rank 0; 0 on rank 1. Load the same checkpoint, and call "
        "step() the same number of times, on all."
    )
    assert run(2, _sharded, 0) == [(SEEN + 1, wanted)] * 2
    assert run(2, _sharded, None) == [(0, "trained")] * 2


# --- a step that is not the same on all -------------------------------------------------------------------------------


def _called(rank: int, world: int, case: str) -> tuple[int, str, bool]:
    nets = [_net(), _net()]
    params = [list(net.parameters()) for net in nets]
    both = nn.ModuleDict({"a": nets[0], "b": nets[1]})
    both.forward = lambda x: nets[0](x) + nets[1](x)  # type: ignore[method-assign]
    optimizers = [torch.optim.SGD(own, lr=0.05) for own in params]
    amp = mezzo.prepare(both, optimizers, "fp32", skip="independent")
    ddp = DistributedDataParallel(amp.model)
    _step(amp, ddp, rank, -1)  # in which the ranks meet
    amp.consensus.num_steps = 0  # type: ignore[union-attr]
    for number in range(SEEN + 2):
        is_other = number == SEEN and rank == 1
        amp.zero_grad()
        if case == "lr" and is_other:
            optimizers[0].param_groups[0]["lr"] = 0.04
        optimizers[0].param_groups[0]["found"] = float(rank)  # as Prodigy keeps what it found out of its own shards
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        amp.backward((ddp(x) - x.sum(1, keepdim=True)).square().mean())
        before = [p.detach().clone() for p in both.parameters()]
        try:
            if case == "optimizer":
                for one in reversed(optimizers) if is_other else optimizers:
                    amp.step(optimizer=one)
            else:
                amp.step(max_norm=2.0 if case == "max_norm" and is_other else [1.0, 1][rank])
        except MezzoError as error:
            same = all(torch.equal(one, other) for one, other in zip(before, both.parameters(), strict=True))
            return number, str(error), same
    return 0, "trained", False


_OTHER_CALLS = {
    "optimizer": "amp.step(optimizer=0) on rank 0; amp.step(optimizer=1) on rank 1",
    "max_norm": "amp.step(max_norm=1.0) on rank 0; amp.step(max_norm=2.0) on rank 1",
    "lr": "SGD, group 0: lr=0.05 on rank 0; SGD, group 0: lr=0.04 on rank 1",
}


@pytest.mark.parametrize("case", _OTHER_CALLS)
def test_a_step_that_is_told_otherwise_on_one_rank_is_refused_before_it_is_taken(case: str) -> None:
    number = 2 * SEEN if case == "optimizer" else SEEN
    wanted = (
        f"ranks cannot train together: step {number} is {_OTHER_CALLS[case]}. Call amp.step with the same arguments, and give the "
        "optimizers the same options, on all ranks."
    )
    assert run(2, _called, case) == [(SEEN, wanted, True)] * 2


def test_where_the_host_reads_late_all_ranks_hear_of_it_one_step_later() -> None:
    for step, said in run(2, _alone_late, "fp32", "write", 0):
        assert step == SEEN + 2 and said.startswith(f"ranks disagree after step {SEEN + 1}: ")
    for number, said, _ in run(2, _called_late, "lr"):
        assert number == SEEN + 1 and said.startswith(f"ranks cannot train together: step {SEEN} is SGD, group 0: lr=")
    assert run(2, _alone_late, "fp32", "load", None) == [(0, "trained")] * 2


def test_the_same_calls_on_all_ranks_train() -> None:
    assert [said for _, said, _ in run(2, _called, "none")] == ["trained"] * 2


def _scheduled(rank: int, world: int) -> int:
    amp, ddp = _prepared("fp32")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(amp.optimizers[0], 8)
    amp.on_applied(scheduler.step)
    with mock.patch.object(consensus, "audit") as audit:
        for number in range(8):
            _step(amp, ddp, rank, number, max_norm=1.0)
            with torch.no_grad():
                for p in amp.model.parameters():
                    p.clamp_(-0.5, 0.5)
    return audit.call_count


def test_schedules_and_weights_clamped_by_all_ranks_are_compared_no_more_often() -> None:
    assert run(2, _scheduled) == [3, 3]
