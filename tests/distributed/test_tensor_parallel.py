"""Weights that lie in parts on a mesh: by tensor and sequence parallelism, with shards across, or on some of the ranks only."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.distributed.ranks import run
from tests.tolerance import relative
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo

pytestmark = pytest.mark.distributed

Result = tuple[dict[str, Tensor], list[float]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(self.norm(x)))))


def _net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def _train(net: nn.Module, policy: str, share: slice = slice(None), seed: int = 0) -> Result:
    options = {"master": mezzo.Policy.parse(policy).master}
    amp = mezzo.prepare(net, mezzo.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **options), policy)
    norms = []
    for step in range(4):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * seed + step))
        amp.zero_grad()
        amp.backward((net(x[share]).float() - x[share, :4]).square().mean())
        norms.append(amp.step(max_norm=0.2).grad_norm)
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in net.named_parameters()}, norms  # fmt: skip


def _whole(rank: int, world: int, policy: str, seed: int = 0) -> Result:
    return _train(_net(seed), policy, seed=seed)


def _parallel(rank: int, world: int, policy: str, is_sequence: bool) -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    net, plan = _net(), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if is_sequence:
        plan = {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(),
        }
    return _train(parallelize_module(net, init_device_mesh("cpu", (world,)), plan), policy)


def _compare(found: Result, wanted: Result, policy: str) -> None:
    eps = relative(torch.float32 if policy == "fp32" else torch.bfloat16, 8)
    assert found[1] == pytest.approx(wanted[1], rel=eps)
    for name, value in wanted[0].items():
        assert torch.allclose(found[0][name].float(), value.float(), rtol=0.0, atol=eps), name


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
def test_parallel_tensors_go_the_way_of_one_rank(policy: str, is_sequence: bool) -> None:
    (wanted,) = run(1, _whole, policy)
    found = run(2, _parallel, policy, is_sequence)
    for one in found:
        _compare(one, wanted, policy)
        assert all(torch.equal(value, found[0][0][name]) for name, value in one[0].items())


def _sharded_across(rank: int, world: int) -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, net = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), _net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    mezzo.distributed.fully_shard(net, "fp32", mesh=mesh["dp"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the output is a view, and nobody writes it
        return _train(net, "fp32", slice(rank // 2, None, 2))


def test_parallel_tensors_with_shards_across_go_the_way_of_one_rank() -> None:
    (wanted,) = run(1, _whole, "fp32")
    for found in run(4, _sharded_across):
        _compare(found, wanted, "fp32")


def _in_ddp(rank: int, world: int, is_wrapped_first: bool) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh, net = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), _net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _pre_dp_module_transform(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, process_group=mesh["dp"].get_group()) if is_wrapped_first else net
    try:
        mezzo.prepare(model, optimizer, "fp32")
    except mezzo.errors.PolicyError as error:
        return str(error)
    return "prepared"


@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_parallel_tensors_inside_copies_are_refused_with_what_to_write(is_wrapped_first: bool) -> None:
    """Torch's transform hides which weights are parts: each rank clipped by the norm of its own, and whole weights drifted apart."""
    wanted = (
        "the model is parallel by tensors, and was made ready for DistributedDataParallel, which takes their parts for whole weights: "
        "each rank would check and clip the gradients of its own part alone. Write mezzo.distributed.fully_shard(model, policy, "
        "mesh=mesh['dp']) around the parallel model in its place, then make the optimizer, then prepare."
    )
    assert run(4, _in_ddp, is_wrapped_first) == [wanted] * 4


def _prepared_again(rank: int, world: int) -> tuple[int, bool]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("model", "replica", "shard"))
    net, groups = _net(rank // 2), []
    mezzo.distributed.fully_shard(net, "fp32", mesh=mesh["replica", "shard"])
    for _ in range(3):
        amp = mezzo.prepare(net, mezzo.optim.SGD(net.parameters(), lr=0.1), "fp32")
        assert amp.consensus is not None
        groups.append(amp.consensus.group)
        amp.release()
    return len({group.handle for group in groups}), groups[0].ranks == (rank // 2 * 2, rank // 2 * 2 + 1)


def test_a_model_on_a_part_of_a_mesh_makes_its_group_of_ranks_once() -> None:
    assert run(4, _prepared_again) == [(1, True)] * 4


def _two_models(rank: int, world: int) -> Result:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, net = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard")), _net(rank // 2)
    mezzo.distributed.fully_shard(net, "fp32", units=[net.up], mesh=mesh["shard"])
    return _train(net, "fp32", slice(rank % 2, None, 2), seed=rank // 2)


def test_each_of_two_models_on_two_ranks_goes_its_own_way() -> None:
    wanted = [run(1, _whole, "fp32", seed)[0] for seed in range(2)]
    for rank, found in enumerate(run(4, _two_models)):
        _compare(found, wanted[rank // 2], "fp32")


def _drifting(rank: int, world: int, is_across: bool) -> tuple[str | None, str | None]:
    """Write what two ranks have copies of on one of them alone; what the run says, and what one without the write does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    said = []
    for is_written in (False, True):
        net = _net()
        if is_across:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
            mezzo.distributed.fully_shard(net, "fp32", mesh=mesh)
        else:
            distribute_module(net, init_device_mesh("cpu", (world,)))
        amp = mezzo.prepare(net, mezzo.optim.SGD(net.parameters(), lr=0.1), "fp32")
        try:
            for step in range(3):
                amp.zero_grad()
                loss = net(_input(net, step)).square().mean()
                amp.backward(getattr(loss, "to_local", lambda loss=loss: loss)())
                amp.step()
                if is_written and rank == 1:
                    net.up.weight.to_local().data.add_(1.0)
            said.append(None)
        except mezzo.errors.DistributedError as error:
            said.append(str(error))
    return said[0], said[1]


def _input(net: nn.Module, step: int) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    x, weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)), net.up.weight
    is_sharded = isinstance(net, torch.distributed.fsdp.FSDPModule)
    return x if is_sharded else DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)


@pytest.mark.parametrize(("world", "sides"), [(2, ("rank 0", "rank 1")), (4, ("rank 1", "rank 3"))])
def test_copies_of_parallel_tensors_that_drift_apart_are_told(world: int, sides: tuple[str, str]) -> None:
    for quiet, said in run(world, _drifting, world == 4):
        assert quiet is None
        assert said is not None and "the checksum of parameter '" in said
        assert all(f"on {side}" in said for side in sides) and "rank 2" not in said
