"""Sharded models: gradients equal those of one rank bit for bit, and the sharding's own casts must fit the policy."""

from __future__ import annotations

import os

import pytest
import torch
from tests.distributed.models import Language
from tests.distributed.ranks import outcomes, run
from tests.tolerance import relative
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F

import mezzo
from mezzo import Policy
from mezzo.distributed import fully_shard
from mezzo.distributed.fsdp import _naming_sharded, check_sharded
from mezzo.distributed.shard_plan import plan_shards
from mezzo.errors import ConfigError, DistributedError, PolicyError

pytestmark = pytest.mark.distributed

IDS = torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(3))


def _gradients(rank: int, world: int, policy: str, tied: bool, with_units: bool) -> dict[str, Tensor]:
    model = Language(tied)
    parts = IDS.chunk(2)
    if world > 1:
        fully_shard(model, policy, units=model.layers if with_units else ())
        parts = parts[rank : rank + 1]
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    for ids in parts:
        amp.backward(F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()) / len(parts))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if world > 1 else grad for name, grad in grads.items()}


@pytest.mark.parametrize("with_units", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "bf16, layers.0=fp32"])
def test_two_ranks_have_the_gradients_of_one_bit_for_bit(policy: str, tied: bool, with_units: bool) -> None:
    wanted = run(1, _gradients, policy, tied, with_units)[0]
    for grads in run(2, _gradients, policy, tied, with_units):
        assert grads.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(grads[name], wanted[name])] == []


def _local(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    model(torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _reduced(rank: int, world: int, policy: str, divides: bool) -> dict[str, Tensor] | str:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    fully_shard(model, policy)
    if divides:
        model.set_gradient_divide_factor(7.0)
    try:
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    except ConfigError as error:
        return str(error)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("reduce", ["bf16", "fp16"])
@pytest.mark.parametrize("world", [2, 3])
def test_16_bit_traffic_is_summed_in_fp32_and_rounded_once(world: int, reduce: str) -> None:
    dtype = torch.bfloat16 if reduce == "bf16" else torch.float16
    parts = [_local(rank) for rank in range(world)]
    for grads in run(world, _reduced, f"fp32, reduce={reduce}", False):
        for name, grad in grads.items():
            sent = torch.stack([part[name].to(dtype) for part in parts]).double()
            if reduce == "bf16" or world == 2:
                assert torch.equal(grad, (sent.sum(0).float() / world).to(dtype).float())
            else:  # torch divides fp16 in two steps, of which one is rounded before the sum
                bound = relative(dtype, 3) * sent.abs().sum(0) / world + torch.finfo(dtype).smallest_normal
                assert bool(((grad - sent.mean(0)).abs() <= bound).all())


def _replicated(rank: int, world: int, shape: tuple[int, int], syncs_late: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    fully_shard(model, "fp32, reduce=bf16", mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")))
    if syncs_late:
        model.set_requires_all_reduce(False)
    model(torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    if syncs_late:
        model.set_requires_all_reduce(True)
        (model(torch.zeros(4, 7)).sum() * 0).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("shape", "syncs_late"),
    [
        ((3, 1), False),
        pytest.param((2, 2), False, marks=pytest.mark.slow),
        pytest.param((4, 1), True, marks=pytest.mark.slow),
    ],
)
def test_replicas_of_shards_are_summed_in_fp32_and_rounded_once(shape: tuple[int, int], syncs_late: bool) -> None:
    """Each mean over shards is what is sent on, in 16 bit, to the mean over replicas."""
    replicas, shards = shape
    parts = [_local(rank) for rank in range(replicas * shards)]
    for grads in run(replicas * shards, _replicated, shape, syncs_late):
        for name, grad in grads.items():
            sent = torch.stack([part[name].bfloat16() for part in parts]).double().view(replicas, shards, *grad.shape)
            means = (sent.sum(1).float() / shards).bfloat16().double()
            assert torch.equal(grad, (means.sum(0).float() / replicas).bfloat16().float()), name


def test_a_factor_of_the_callers_own_is_refused() -> None:
    for said in run(2, _reduced, "fp32, reduce=bf16", True):
        assert said == (
            "sharded gradients in bf16 are summed in fp32 by mezzo, and set_gradient_divide_factor has torch multiply before "
            "it adds. Call set_force_sum_reduction_for_comms(True) too, which has it divide behind."
        )


def _check(rank: int, world: int, policy: str, casts: dict[str, object], apart: bool) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    if apart:
        torch_fully_shard(model[1], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    torch_fully_shard(model, mp_policy=MixedPrecisionPolicy(**casts))
    try:
        check_sharded(model, Policy.parse(policy))
    except PolicyError as error:
        return str(error)
    return "agrees"


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize(
    ("policy", "casts", "apart", "answer"),
    [
        ("bf16", BF16, True, "agrees"),
        ("fp32", {}, False, "agrees"),
        ("bf16", {}, False, "agrees"),
        ("bf16, reduce=bf16", {"param_dtype": torch.bfloat16}, True, "declares reduce=bf16, and the sharding reduces the gradients of '1' in fp32"),
        ("bf16", BF16, False, "gathers the weights of '1' in bf16, and the policy"),
        ("fp16", BF16, True, "gathers the weights of '0' in bf16, and the policy"),
        ("fp32", BF16, True, "gathers the weights of '0' in bf16, and the policy"),
        ("bf16, module:2=fp32", BF16, True, "gathers the weights of '2' in bf16, and the policy"),
        ("bf16", {"param_dtype": torch.bfloat16}, True, "declares reduce=fp32, and the sharding reduces the gradients of '0' in bf16"),
        ("bf16-master", {}, True, "declares reduce=fp32, and the sharding reduces the gradients of '0' in bf16"),
        ("bf16, output=none", {**BF16, "output_dtype": torch.float32}, True, "casts outputs of 'the root' to fp32, which the policy"),
        ("bf16, output=fp32", {**BF16, "output_dtype": torch.float32}, True, "agrees"),
    ],
)  # fmt: skip
def test_two_mechanisms_must_agree(policy: str, casts: dict[str, object], apart: bool, answer: str) -> None:
    assert answer in run(1, _check, policy, casts, apart)[0]


@pytest.mark.parametrize(
    ("policy", "casts", "apart", "is_offered"),
    [
        ("fp32", {"reduce_dtype": torch.bfloat16}, False, True),
        ("fp32", {"reduce_dtype": torch.bfloat16}, True, False),
        ("bf16-master", {}, True, False),
    ],
)
def test_a_policy_with_another_reduce_is_offered_where_it_is_taken(
    policy: str, casts: dict[str, object], apart: bool, is_offered: bool
) -> None:
    refusal = run(1, _check, policy, casts, apart)[0]
    assert "Write MixedPrecisionPolicy(reduce_dtype=torch.float32)" in refusal
    assert ("or reduce=bf16 in the policy" in refusal) is is_offered
    assert (run(1, _check, f"{policy}, reduce=bf16", casts, apart)[0] == "agrees") is is_offered


def _lost(rank: int, world: int) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mezzo.distributed.fully_shard(net, "fp32", units=list(net))
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32")
    amp.backward(net(torch.ones(2, 4)).sum())
    amp.step()
    if rank == 1:
        os._exit(0)
    with pytest.raises(DistributedError) as caught:
        for _ in range(2):
            net(torch.ones(2, 4))
    return str(caught.value)


def test_a_rank_that_ends_before_a_gather_is_named() -> None:
    first, second = outcomes(2, _lost)
    assert second.error == "ended without an answer"
    assert first.error is None and str(first.value).startswith("rank 1 ended, and rank 0 waits for it.")


def _refused(rank: int, world: int, case: str) -> tuple[str, list[str]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    units = [model[0], model[1]]
    if case == "scalar":
        model[1].gain = nn.Parameter(torch.tensor(1.0))
    try:
        fully_shard(
            model, "bf16" if rank or case != "policies" else "fp32", units=units[: rank + 1 if case == "units" else 2]
        )
    except (PolicyError, DistributedError) as error:
        return str(error), [name for name, p in model.named_parameters() if type(p) is not nn.Parameter]
    return "", []


@pytest.mark.parametrize("case", ["policies", "units"])
def test_ranks_that_shard_apart_are_refused_before_anything_is_sharded(case: str) -> None:
    for said, sharded in run(2, _refused, case):
        assert said.startswith("ranks cannot train together: fully_shard goes by ") and sharded == []


def test_where_torch_refuses_a_part_it_is_said_what_is_left() -> None:
    for said, sharded in run(2, _refused, "scalar"):
        assert sharded == ["0.weight", "0.bias"]
        assert said == (
            "torch's fully_shard refused '1': fully_shard doesn't support scalar parameters. Change gain to a 1D tensor with numel equal to 1. By "
            "then 0 had been sharded, which cannot be taken back: change what it names, make the model anew, and call fully_shard again."
        )


def test_a_mesh_is_one() -> None:
    with pytest.raises(PolicyError, match="fully_shard was given str for mesh; give a DeviceMesh"):
        fully_shard(nn.Linear(2, 2), "bf16", mesh="dp")


def test_an_error_of_torchs_that_says_nothing_is_told_by_its_class() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    first, second, *_ = plan_shards(net, Policy.parse("fp32"), list(net)).groups
    with pytest.raises(PolicyError, match=r"refused '1': RuntimeError\. By then 0 had been sharded"):
        with _naming_sharded([first], second):
            raise RuntimeError
