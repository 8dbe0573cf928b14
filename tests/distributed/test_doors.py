"""What ranks cannot train with is refused when it is prepared, or when they meet, in one sentence on each; what they can is not."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.distributed.ranks import run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import mezzo
from mezzo.errors import MezzoError

pytestmark = pytest.mark.distributed


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def _steps(amp: mezzo.Stepper, call: nn.Module, rank: int, steps: int = 3) -> list[float]:
    norms = []
    for step in range(steps):
        amp.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        amp.backward((call(x).float() - x.sum(1, keepdim=True)).square().mean())
        norms.append(amp.step(max_norm=0.2).grad_norm)
    return norms


# --- FullyShardedDataParallel -----------------------------------------------------------------------------------------


def _flat(module: nn.Module, *, keeps_params: bool = True) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and would rather have a GPU
        return FullyShardedDataParallel(module, use_orig_params=keeps_params, device_id=torch.device("cpu"))


def _fsdp1(rank: int, world: int, where: str) -> str:
    net: nn.Module = _net()
    if where == "around":
        net = _flat(net, keeps_params=False)
    elif where == "inside":
        net[0] = _flat(net[0])  # type: ignore[index]
    classes = [type(module) for module in net.modules()]
    try:
        amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32")
        if where == "behind":
            net = _flat(net)
        elif where == "behind, inside":
            net[0] = _flat(net[0])  # type: ignore[index]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _steps(amp, net, rank)
    except MezzoError as error:
        is_untouched = "behind" in where or classes == [type(module) for module in net.modules()]
        return f"{type(error).__name__}: {error}{'' if is_untouched else ' (and was changed)'}"
    return "trained"


@pytest.mark.parametrize("where", ["around", "inside", "behind", "behind, inside"])
def test_flat_shards_are_refused_with_what_to_write(where: str) -> None:
    wanted = (
        "PolicyError: the model is divided by FullyShardedDataParallel, and each rank would check and clip the gradients of its own "
        "part alone. Write mezzo.distributed.fully_shard(model, policy, units=...) in its place, then make the optimizer, then prepare."
    )
    assert run(2, _fsdp1, where) == [wanted, wanted]


def _no_training(rank: int, world: int) -> bool:
    net, wanted = _flat(_net()), _net()
    mezzo.prepare(net, None, "fp32")
    x = torch.ones(2, 6)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.equal(net(x), wanted(x))


def test_flat_shards_that_are_not_trained_run() -> None:
    assert run(2, _no_training) == [True, True]


def test_one_rank_has_all_of_its_flat_shard() -> None:
    assert run(1, _fsdp1, "around") == ["trained"]


# --- torch's own fully_shard ------------------------------------------------------------------------------------------


def _sharded(rank: int, world: int, policy: str, has_units: bool) -> str | list[float]:
    net = _net()
    mixed = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in [*net, net] if has_units else [net]:
        torch_fully_shard(module, mp_policy=mixed)
    before = [p.dtype for p in net.parameters()]
    master = mezzo.Policy.parse(policy).master
    try:
        amp = mezzo.prepare(net, mezzo.optim.AdamW(net.parameters(), lr=0.1, master=master), policy)
    except MezzoError as error:
        return f"{type(error).__name__}: {error}" if [p.dtype for p in net.parameters()] == before else "was changed"
    return _steps(amp, net, rank)


def test_a_group_that_would_be_stored_in_two_dtypes_is_refused() -> None:
    wanted = (
        "PolicyError: the sharding gathers '0.weight' in bf16 and '1.weight' in fp32 together, and torch wants one dtype for all that is "
        "trained in a group. Write mezzo.distributed.fully_shard(model, policy, units=...), which makes a group of its own where "
        "dtypes differ."
    )
    assert run(2, _sharded, "bf16-master", False) == [wanted, wanted]


@pytest.mark.parametrize(("policy", "has_units"), [("bf16-master", True), ("bf16", False), ("fp32", True)])
def test_groups_of_one_dtype_train(policy: str, has_units: bool) -> None:
    first, second = run(2, _sharded, policy, has_units)
    assert first == second and len(first) == 3
