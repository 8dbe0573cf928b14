"""What ranks cannot train with is refused when it is prepared, or when they meet, in one sentence on each; what they can is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tests.distributed.ranks import outcomes, run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

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


def _part(rank: int, world: int) -> str:
    net = _net()
    torch_fully_shard(net[0])
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32")
    with pytest.raises(MezzoError) as caught:
        _steps(amp, net, rank)
    return str(caught.value)


def test_what_lies_beside_a_sharded_part_is_named() -> None:
    for sentence in run(2, _part):
        assert sentence.endswith(
            "Nothing averages the gradients of 1.weight, 1.bias, 2.weight and 1 more, which lie outside of what is sharded. Call "
            "fully_shard on the model that holds them too."
        )


# --- options of DistributedDataParallel and ZeroRedundancyOptimizer ---------------------------------------------------

_WAYS = {
    "mixed_precision": "PolicyError: the DistributedDataParallel model has mixed_precision, and the policy casts weights too: two "
    "mechanisms would, each its own way. Leave mixed_precision out.",
    "delayed": "PolicyError: the DistributedDataParallel model has delay_all_reduce_named_params, which writes gradients before each "
    "forward that amp.backward did not make. Leave it out.",
    "builtin hook": "PolicyError: the DistributedDataParallel model sends gradients by another hook already (of an optimizer inside of "
    "backward, or built into torch), and the policy's reduce=fp32 would not be kept. Leave it out.",
    "bucket view": "PolicyError: 4 parameters (0.weight, 0.bias, 2.weight and 1 more) would be stored anew, and ZeroRedundancyOptimizer took hold of them as they "
    "are. Leave parameters_as_bucket_view out, or keep weights in fp32 (params=fp32).",
    "frozen": "DistributedError: 0.bias was frozen after DistributedDataParallel took the model, which waits for gradients of all "
    "and would leave others unaveraged. Write DistributedDataParallel(model, find_unused_parameters=True), or wrap the model again.",
    "static": "DistributedError: DistributedDataParallel(static_graph=True) learns the graph from its first backward pass, which ran inside "
    "no_sync(). Leave static_graph out, or average the first one.",
}


def _way(rank: int, world: int, case: str) -> str:
    net: nn.Module = _net()
    before = [(p.dtype, p.data_ptr()) for p in net.parameters()]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options: dict[str, object] = {}
    if case == "mixed_precision":
        options["mixed_precision"] = _MixedPrecision(param_dtype=torch.bfloat16)
    if case == "delayed":
        options = {
            "delay_all_reduce_named_params": [("2.weight", net[2].weight)],
            "param_to_hook_all_reduce": net[0].weight,
        }
    if case in ("static", "found"):
        options = {"static_graph": case == "static", "find_unused_parameters": case == "found"}
    if case == "bucket view":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=mezzo.optim.AdamW, lr=0.1, parameters_as_bucket_view=True
        )
        before = [(p.dtype, p.data_ptr()) for p in net.parameters()]
    ddp = DistributedDataParallel(net, **options) if case != "bucket view" else net
    if case == "builtin hook":
        ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    try:
        amp = mezzo.prepare(ddp, optimizer, "bf16-master" if case == "bucket view" else "fp32")
        with ddp.no_sync() if case == "static" else nullcontext():
            _steps(amp, ddp, rank, 1)
        net[0].bias.requires_grad_(case not in ("frozen", "found"))
        _steps(amp, ddp, rank)
    except MezzoError as error:
        is_same = case in ("frozen", "static") or [(p.dtype, p.data_ptr()) for p in net.parameters()] == before
        return f"{type(error).__name__}: {error}{'' if is_same else ' (and was changed)'}"
    return "trained"


def _makes_streams() -> bool:
    try:
        return isinstance(torch.Stream(), torch.Stream)
    except RuntimeError:
        return False


@pytest.mark.parametrize("case", _WAYS)
def test_what_goes_its_own_way_is_refused(case: str) -> None:
    if case == "mixed_precision" and not _makes_streams():
        pytest.skip("torch built for CUDA makes no stream where there is no GPU, and this DDP wants one")
    found = run if case != "static" else _fresh
    assert found(2, _way, case) == [_WAYS[case]] * 2


def _fresh(world: int, fn: Callable[..., str], *args: str) -> list[str]:
    return [found.value for found in outcomes(world, fn, *args)]


def test_what_is_frozen_late_trains_where_the_wrapper_looks_for_it() -> None:
    assert run(2, _way, "found") == ["trained"] * 2
