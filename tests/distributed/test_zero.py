"""ZeroRedundancyOptimizer around an optimizer with masters: each rank steps its part, and the weights are those of one rank."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import mezzo

with warnings.catch_warnings():  # it still goes through torch.jit.script (2.13)
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.distributed


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def _adamw(net: nn.Module, is_divided: bool, **options: Any) -> torch.optim.Optimizer:
    if is_divided:
        return ZeroRedundancyOptimizer(net.parameters(), optimizer_class=mezzo.optim.AdamW, **options)
    return mezzo.optim.AdamW(net.parameters(), **options)


def _loss(ddp: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return (ddp(x).float() - x.sum(1, keepdim=True)).square().mean()


def _train(rank: int, world: int, policy: str, is_divided: bool, seed: int) -> list[Tensor]:
    torch.manual_seed(seed * rank)
    net = _net()
    optimizer = _adamw(net, is_divided, lr=0.05, master=mezzo.Policy.parse(policy).master)
    amp = mezzo.prepare(net, optimizer, policy)
    ddp = DistributedDataParallel(net)
    for step in range(4):
        amp.zero_grad()
        amp.backward(_loss(ddp, rank, step) * (torch.inf if step == 2 and rank == 1 else 1.0))
        assert amp.step().applied is (step != 2)
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "bf16-master, master=fp32"])
def test_divided_state_and_masters_step_as_whole_ones(policy: str) -> None:
    wanted = run(2, _train, policy, False, 0)[0]
    for found in run(2, _train, policy, True, 0):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_ranks_that_were_seeded_differently_stay_together() -> None:
    first, second = run(2, _train, "bf16-master", True, 7)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _prepared(rank: int, world: int, kind: str, policy: str, options: dict[str, str]) -> str:
    torch.manual_seed(0)
    net = nn.Linear(6, 1)
    home = mezzo.optim if kind.startswith("mezzo.") else torch.optim
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), optimizer_class=getattr(home, kind.rpartition(".")[2]), lr=0.05, **options
    )
    before = [dict(group) for group in optimizer.param_groups]
    try:
        amp = mezzo.prepare(net, optimizer, policy)
        _step_once(amp, DistributedDataParallel(net), rank)
    except mezzo.errors.MezzoError as error:
        return str(error)
    amp.release()
    is_back = all(group.items() >= one.items() for group, one in zip(optimizer.param_groups, before, strict=True))
    return "trained" if is_back else f"{before} became {optimizer.param_groups}"


def _step_once(amp: mezzo.Stepper, ddp: nn.Module, rank: int) -> None:
    amp.backward((ddp(torch.full((4, 6), rank + 1.0)).float() - 1).square().mean())
    amp.step()


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling.init_scale=256", "bf16-master, master=kahan"])
@pytest.mark.parametrize(("kind", "meant"), [("AdamW", "AdamW"), ("Adam", "Adam"), ("SGD", "SGD"), ("NAdam", "AdamW")])
def test_what_keeps_no_masters_is_refused_with_what_does(kind: str, meant: str, policy: str) -> None:
    master, stored = mezzo.Policy.parse(policy).master, policy.partition("-")[0]
    wanted = (
        f"the policy stores weights in {stored} with master={master}, and ZeroRedundancyOptimizer divides {kind}, which keeps no "
        f"masters. Write ZeroRedundancyOptimizer(..., optimizer_class=mezzo.optim.{meant}, master='{master}'), or keep weights in fp32 "
        "(params=fp32)."
    )
    assert run(2, _prepared, kind, policy, {}) == [wanted, wanted]
    assert run(2, _prepared, f"mezzo.{meant}", policy, {"master": master}) == ["trained", "trained"]


def test_masters_are_those_of_the_policy_where_none_were_asked_for() -> None:
    assert run(2, _prepared, "mezzo.AdamW", "bf16-master", {}) == ["trained", "trained"]


def _save(rank: int, world: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    net = nn.Linear(6, 1)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=mezzo.optim.AdamW, lr=0.05)
    amp = mezzo.prepare(net, optimizer, "bf16")
    ddp = DistributedDataParallel(net)
    amp.backward(ddp(torch.ones(2, 6)).square().mean())
    amp.step()
    with pytest.raises(mezzo.errors.CheckpointError) as caught:
        amp.state_dict()
    assert "model" not in amp.state_dict(weights=False)
    optimizer.consolidate_state_dict(to=0)
    is_whole = rank != 0 or set(amp.state_dict()["optimizers"][0]["state"]) == {0, 1}
    return str(caught.value), is_whole


def test_a_checkpoint_says_what_to_call_first_and_holds_the_state_of_all_ranks_then() -> None:
    for sentence, is_whole in run(2, _save):
        assert sentence == (
            "amp.state_dict() was asked of a ZeroRedundancyOptimizer, whose state lies in parts on the ranks. Call "
            "optimizer.consolidate_state_dict(to=0) on every rank, then amp.state_dict() on rank 0 alone; "
            "amp.state_dict(weights=False) needs none of it."
        )
        assert is_whole


Weights = dict[str, Tensor]


def _exported(rank: int, world: int, policy: str, is_divided: bool, is_released: bool) -> Weights:
    torch.manual_seed(0)
    net = _net()
    amp = mezzo.prepare(net, _adamw(net, is_divided, lr=0.003), policy)
    ddp = DistributedDataParallel(net)
    for step in range(3):
        amp.zero_grad()
        amp.backward(_loss(ddp, rank, step))
        amp.step()
    if not is_released:
        return amp.export_weights()
    amp.release()
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize("policy", ["bf16-master", "bf16-master, master=fp32", "fp16-master, scaling.init_scale=256"])
def test_weights_are_the_masters_of_all_ranks(policy: str, is_released: bool) -> None:
    wanted = run(2, _exported, policy, False, is_released)[0]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in wanted.values())
    for found in run(2, _exported, policy, True, is_released):
        assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(wanted, torch.float32)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def _run_on(
    rank: int, policy: str, steps: range, state: dict[str, Any] | None = None, how: str = "all at once"
) -> tuple[mezzo.Stepper, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    net = _net()
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), optimizer_class=mezzo.optim.AdamW, lr=0.01 if state else 0.003
    )
    amp = mezzo.prepare(net, optimizer, policy)
    if state is not None:
        _load(amp, state, how)
    ddp = DistributedDataParallel(net)
    for step in steps:
        amp.zero_grad()
        amp.backward(_loss(ddp, rank, step))
        amp.step()
    return amp, optimizer


def _load(amp: mezzo.Stepper, state: dict[str, Any], how: str) -> None:
    if how == "all at once":
        amp.load_state_dict(state)
    elif how == "weights first":
        amp.model.load_state_dict(state["model"])
    if how != "all at once":
        amp.optimizers[0].load_state_dict(state["optimizers"][0])
    if how == "optimizer first":
        amp.model.load_state_dict(state["model"])


def _resumed(rank: int, world: int, policy: str, later: str, how: str) -> tuple[Weights, Weights, Weights]:
    """Return what a checkpoint was made of, what a new run loads from it, and where that run ends after 2 more steps."""
    amp, optimizer = _run_on(rank, policy, range(2))
    saved = amp.export_weights()
    optimizer.consolidate_state_dict(to=0)
    box = [copy.deepcopy(amp.state_dict()) if rank == 0 else None]
    torch.distributed.broadcast_object_list(box)
    loaded = _run_on(rank, later, range(0), copy.deepcopy(box[0]), how)[0].export_weights()
    return saved, loaded, _run_on(rank, later, range(2, 4), box[0], how)[0].export_weights()


_FP32 = "bf16-master, master=fp32"


@pytest.mark.parametrize(
    ("policy", "later", "how"),
    [
        *((policy, later, "all at once") for policy in ("bf16-master", _FP32) for later in ("bf16-master", _FP32)),
        ("bf16-master", "bf16-master", "optimizer first"),
        ("bf16-master", _FP32, "weights first"),
        (_FP32, "bf16-master", "weights first"),
        ("bf16-master", "bf16", "all at once"),
        ("bf16-master", "bf16", "weights first"),
    ],
)
def test_a_resumed_run_goes_on_from_the_masters_of_all_ranks(policy: str, later: str, how: str) -> None:
    wanted = run(2, _straight_on, policy)
    for (saved, loaded, end), goal in zip(run(2, _resumed, policy, later, how), wanted, strict=True):
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        assert later == "bf16" or all(torch.equal(end[name], value) for name, value in goal.items())


def _refused(rank: int, world: int) -> tuple[str, bool]:
    amp, optimizer = _run_on(rank, "bf16-master", range(1))
    before, kept = amp.export_weights(), copy.deepcopy(optimizer.optim.state_dict())
    state = {key: {"exp_avg": torch.zeros(1)} for key in range(4)}
    with pytest.raises(mezzo.errors.CheckpointError) as caught:
        optimizer.load_state_dict({"state": state, "param_groups": [{"params": [0, 1, 2, 3]}]})
    after = amp.export_weights()
    is_same = all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value), is_same and _equal(kept["state"], optimizer.optim.state_dict()["state"])


def _equal(one: dict[int, Weights], other: dict[int, Weights]) -> bool:
    return all(torch.equal(value, other[key][name]) for key, entry in one.items() for name, value in entry.items())


def test_a_state_that_does_not_fit_is_refused_by_all_ranks_before_a_part_is_written() -> None:
    for sentence, is_same in run(2, _refused):
        assert "['exp_avg'] has shape [1], and [8, 6] is wanted. Nothing was loaded." in sentence
        assert is_same


def _straight_on(rank: int, world: int, policy: str) -> Weights:
    return _run_on(rank, policy, range(4))[0].export_weights()


def _late(rank: int, world: int, policy: str) -> str:
    amp, optimizer = _run_on(rank, policy, range(1))
    optimizer.consolidate_state_dict(to=0)
    amp.zero_grad()
    amp.backward(amp.model(torch.ones(2, 6)).float().square().mean())
    amp.step()
    if rank != 0:
        return ""
    with pytest.raises(mezzo.errors.CheckpointError) as caught:
        amp.state_dict()
    return str(caught.value)


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_state_from_before_the_last_step_is_not_saved_beside_later_weights(policy: str) -> None:
    assert run(2, _late, policy)[0] == (
        "amp.state_dict() was asked of a ZeroRedundancyOptimizer, whose state was put together before its last step. Call "
        "optimizer.consolidate_state_dict(to=0) on every rank again, then amp.state_dict() on rank 0."
    )


def _joining(rank: int, world: int, joins_wrapper: bool) -> str:
    net = nn.Linear(4, 2)
    ddp = DistributedDataParallel(net) if joins_wrapper else net
    zero = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
    amp = mezzo.prepare(net, zero, "bf16")
    try:
        with Join([ddp, zero] if joins_wrapper else [zero]):
            for _ in range(3 + rank):
                amp.zero_grad()
                amp.backward(ddp(torch.ones(2, 4)).float().square().mean())
                amp.step()
    except mezzo.errors.DistributedError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("joins_wrapper", [True, False])
def test_uneven_inputs_by_join_are_refused_on_all_ranks_alike(joins_wrapper: bool) -> None:
    first, second = run(2, _joining, joins_wrapper)
    where = "ddp.join()" if joins_wrapper else "Join([optimizer])"
    assert first == second and first.startswith(f"amp.backward was called inside `with {where}:`"), first
