"""Gradients of DistributedDataParallel: averaged exactly, sent in the declared dtype, summed in fp32 before."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from tests.distributed.models import Bare, dyadic
from tests.distributed.ranks import run
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from mezzo import Policy
from mezzo.distributed import RankConsensus
from mezzo.distributed.ddp import around, comm_stats, connect
from mezzo.errors import ConfigError, DistributedError, PolicyError
from mezzo.formats import dtype_name

pytestmark = pytest.mark.distributed

Grads = dict[str, Tensor]


def _grads(model: nn.Module) -> Grads:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _ddp(model: nn.Module, policy: str, **options: bool) -> DistributedDataParallel:
    # The loss is computed from weights as they are: this is about traffic, not about casts.
    ddp = DistributedDataParallel(model, find_unused_parameters=True, **options)
    connect(ddp, Policy.parse(policy))
    return ddp


def _rows(rank: int, world: int, total: int = 8) -> Tensor:
    return dyadic(total, 6, seed=99).chunk(world)[rank]


def _average(rank: int, world: int, policy: str, dtype: torch.dtype, view: bool) -> tuple[Grads, int, int]:
    model = Bare(dtype)
    ddp = _ddp(model, policy, gradient_as_bucket_view=view)
    ddp(_rows(rank, world).to(dtype)).float().mean().backward()
    return _grads(model), comm_stats(ddp).payload_bytes, comm_stats(ddp).wire_bytes


def _alone(dtype: torch.dtype) -> Grads:
    model = Bare(dtype)
    model(_rows(0, 1).to(dtype)).float().mean().backward()
    return _grads(model)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_fp32_traffic_averages_bit_for_bit(world: int, view: bool) -> None:
    alone = _alone(torch.float32)
    for grads, _, _ in run(world, _average, "fp32", torch.float32, view):
        assert all(torch.equal(grads[name], alone[name]) for name in alone)


@pytest.mark.parametrize("reduce", ["bf16", "fp16"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_16_bit_traffic_is_summed_in_fp32_and_rounded_once(world: int, reduce: str) -> None:
    dtype = torch.bfloat16 if reduce == "bf16" else torch.float16
    parts = [_local(rank, world) for rank in range(world)]
    for grads, payload, sent in run(world, _average, f"fp32, reduce={reduce}", torch.float32, False):
        num_parameters = sum(p.numel() for p in Bare().parameters())
        assert (payload, sent) == (2 * num_parameters, 2 * (world - 1) * 2 * num_parameters // world)
        for name in parts[0]:
            rounded = torch.stack([(part[name] / world).to(dtype) for part in parts])
            assert torch.equal(grads[name], rounded.double().sum(0).to(dtype).float())  # its sums are exact in fp32


class _Mixed(nn.Module):
    """Layers that fill a bucket each; gradients of the first, which come last, are fp64 and sent as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(5)])
        for index, p in enumerate(self.parameters()):
            p.data = dyadic(*p.shape, seed=index)
        self.layers[0].double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def _mixed_step(model: nn.Module, rank: int) -> Grads:
    model.zero_grad()
    model(dyadic(4, 5, seed=rank)).sum().backward()
    return _grads(model)


def _in_many_buckets(rank: int, world: int) -> tuple[list[Grads], int]:
    model = _Mixed()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    connect(ddp, Policy.parse("fp32, reduce=bf16"))
    _mixed_step(ddp, rank)
    before = comm_stats(ddp).num_by_dtype.total()
    ddp(torch.full((4, 5), math.nan)).sum().backward()
    return [_mixed_step(ddp, rank) for _ in range(2)], comm_stats(ddp).num_by_dtype.total() - before


def test_buckets_that_overlap_stay_apart() -> None:
    parts = [_mixed_step(_Mixed(), rank) for rank in range(3)]
    for steps, num_reductions in run(3, _in_many_buckets):
        assert num_reductions >= 3 * 5
        for grads, name in itertools.product(steps, parts[0]):
            shares = [part[name] / 3 for part in parts]
            found = grads[f"module.{name}"]
            if found.dtype is torch.float64:  # a ring adds in another order
                torch.testing.assert_close(found, torch.stack(shares).sum(0))
            else:
                assert torch.equal(found, torch.stack(shares).bfloat16().double().sum(0).bfloat16().float())


def _static(rank: int, world: int) -> list[Grads]:
    ddp = DistributedDataParallel(_Mixed(), bucket_cap_mb=1e-4, static_graph=True)
    connect(ddp, Policy.parse("fp32, reduce=bf16"))
    return [_mixed_step(ddp, rank) for _ in range(3)]


def test_a_static_graph_whose_first_pass_sends_all_at_its_end() -> None:
    wanted = run(3, _in_many_buckets)[0][0][0]
    for steps in run(3, _static):
        for grads in steps:
            assert all(torch.equal(grads[name], wanted[name]) for name in wanted if wanted[name].dtype is torch.float32)


def _local(rank: int, world: int) -> Grads:
    model = Bare()
    model(_rows(rank, world)).mean().backward()
    return _grads(model)


def test_16_bit_traffic_is_half_of_fp32() -> None:
    wide, narrow = (run(2, _average, f"fp32, reduce={reduce}", torch.float32, False)[0] for reduce in ("fp32", "bf16"))
    num_parameters = sum(p.numel() for p in Bare().parameters())
    assert (wide[1], narrow[1]) == (4 * num_parameters, 2 * num_parameters)
    assert (wide[2], narrow[2]) == (4 * num_parameters, 2 * num_parameters)  # 2 (N - 1) / N is 1 for two ranks


@pytest.mark.parametrize("reduce", ["fp32", "their own"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [2, 3])
def test_16_bit_gradients_travel_as_they_are_and_lose_nothing(world: int, dtype: torch.dtype, reduce: str) -> None:
    policy = f"fp32, reduce={dtype_name(dtype) if reduce == 'their own' else reduce}"
    parts = [_local_low(rank, world, dtype) for rank in range(world)]
    for grads, payload, _ in run(world, _average, policy, dtype, True):
        assert payload == 2 * sum(p.numel() for p in Bare().parameters())
        for name in grads:
            total = torch.stack([part[name] for part in parts]).double().sum(0)
            assert torch.equal(grads[name], (total.float() / world).to(dtype))  # rounded once


def test_16_bit_gradients_may_travel_in_another_dtype() -> None:
    for grads, payload, _ in run(2, _average, "fp32, reduce=bf16", torch.float16, False):
        parts = [_local_low(rank, 2, torch.float16) for rank in range(2)]
        assert payload == 2 * sum(p.numel() for p in Bare().parameters())
        for name in grads:
            halves = torch.stack([(part[name].float() / 2).bfloat16() for part in parts])
            assert torch.equal(grads[name], halves.float().sum(0).bfloat16().half())


def _local_low(rank: int, world: int, dtype: torch.dtype) -> Grads:
    model = Bare(dtype)
    model(_rows(rank, world).to(dtype)).float().mean().backward()
    return _grads(model)


def _large(rank: int, world: int, policy: str) -> Tensor:
    model = nn.Linear(3, 1, bias=False)
    ddp = _ddp(model, policy)
    (ddp(torch.ones(1, 3)) * 40000.0).sum().backward()
    return model.weight.grad


def test_an_fp16_mean_of_finite_gradients_is_finite() -> None:
    for grad in run(4, _large, "fp32, reduce=fp16"):
        assert torch.equal(grad, torch.full((1, 3), 40000.0))  # their sum, 160000, is not


def _micro_batches(
    rank: int, world: int, policy: str, dtype: torch.dtype, count: int, has_views: bool = False
) -> tuple[Grads, int]:
    model = Bare(dtype)
    ddp = _ddp(model, policy, gradient_as_bucket_view=has_views)
    for _ in range(2):  # the second round starts from dropped gradients
        model.zero_grad()
        for index in range(count):
            with nullcontext() if index == count - 1 else ddp.no_sync():
                x = torch.ones(1, 6, dtype=dtype) if index else torch.full((1, 6), 256.0, dtype=dtype)
                ddp(x * (rank + 1)).float().sum().backward()
    return _grads(model), comm_stats(ddp).num_by_dtype.total()


def test_micro_batches_of_fp32_gradients_are_sent_once() -> None:
    model = Bare()
    for rank in range(2):
        for index in range(5):
            model(torch.full((1, 6), 1.0 if index else 256.0) * (rank + 1)).sum().backward()
    for grads, num_reductions in run(2, _micro_batches, "fp32", torch.float32, 5):
        assert num_reductions == 2
        assert all(torch.equal(grads[name] * 2, wanted) for name, wanted in _grads(model).items())


@pytest.mark.parametrize("has_views", [False, True])
def test_micro_batches_of_16_bit_gradients_are_summed_in_fp32(has_views: bool) -> None:
    grads = run(2, _micro_batches, "bf16-master, grads=fp32", torch.bfloat16, 5, has_views)[0][0]
    plain = run(2, _micro_batches, "bf16-master", torch.bfloat16, 5)[0][0]
    # d(loss)/d(first.weight) is last.weight times the inputs' sum: 260 and 520, mean 390, each exact in fp32.
    wanted = Bare(torch.bfloat16).last.weight.float().t() * 390.0
    assert torch.equal(grads["first.weight"][:, :1], wanted.bfloat16())
    # In bf16, whose spacing at 256 is 2, the ones are absorbed.
    assert not torch.equal(plain["first.weight"][:, :1], wanted.bfloat16())


def _unused_in_the_last(rank: int, world: int) -> Tensor:
    model = Bare(torch.bfloat16)
    ddp, x = _ddp(model, "bf16-master, grads=fp32"), torch.ones(1, 6, dtype=torch.bfloat16)
    for _ in range(2):
        model.zero_grad()
        with ddp.no_sync():
            ddp(x, use_spare=True).float().sum().backward()
        ddp(x).float().sum().backward()
    return model.spare.bias.grad


def test_a_micro_batch_counts_whose_layer_the_last_one_left_out() -> None:
    assert [grad.item() for grad in run(2, _unused_in_the_last)] == [1.0, 1.0]


def _zero_grad_between(rank: int, world: int, set_to_none: bool, count: int, has_views: bool) -> Tensor:
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    ddp = _ddp(model, "bf16-master, grads=fp32", gradient_as_bucket_view=has_views)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    ddp(x).float().sum().backward()
    with ddp.no_sync():
        ddp(x * 64).float().sum().backward()
    model.zero_grad(set_to_none)  # gives the micro-batch up
    for index in range(count):
        with nullcontext() if index == count - 1 else ddp.no_sync():
            ddp(x).float().sum().backward()
    return model.weight.grad


@pytest.mark.parametrize("has_views", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_that_were_dropped_stay_dropped(set_to_none: bool, count: int, has_views: bool) -> None:
    for grad in run(2, _zero_grad_between, set_to_none, count, has_views):
        assert torch.equal(grad.float(), torch.full((1, 2), float(count)))


def _never_averaged(rank: int, world: int) -> str:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    ddp = DistributedDataParallel(model)
    consensus = RankConsensus(wrapper=connect(ddp, Policy.parse("bf16-master, grads=fp32")))
    with ddp.no_sync():
        ddp(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum().backward()
    try:
        consensus.combine(torch.zeros(1), torch.zeros(0))
    except DistributedError as error:
        return str(error)
    return "accepted"


def test_gradients_that_were_never_averaged_are_refused() -> None:
    message = (
        "step() was called with the gradients of 2 parameters still on their own rank: every backward of this step ran "
        "inside no_sync(). Run the last one outside of it."
    )
    assert run(2, _never_averaged) == [message, message]


def _unused(rank: int, world: int) -> Grads:
    model = Bare()
    ddp = _ddp(model, "fp32, reduce=bf16")
    ddp(torch.ones(1, 6), use_spare=rank == 0).sum().backward()
    return _grads(model)


def test_a_layer_that_one_rank_used_gets_half_its_gradient_on_all() -> None:
    first, second = run(2, _unused)
    assert first.keys() == second.keys() == {name for name, _ in Bare().named_parameters()}
    assert torch.equal(first["spare.bias"], torch.tensor([0.5]))
    assert all(torch.equal(first[name], second[name]) for name in first)


def _hooks(rank: int, world: int) -> list[str]:
    found = []
    for hook, policy in (
        (fp16_compress_hook, "fp32"),
        (fp16_compress_hook, "fp32, reduce=fp16"),
        (allreduce_hook, "fp32"),
        (allreduce_hook, "bf16-master, grads=fp32"),
    ):
        ddp = DistributedDataParallel(Bare(Policy.parse(policy).params))
        ddp.register_comm_hook(None, hook)
        try:
            connect(ddp, Policy.parse(policy))
            found.append(str(len(ddp._comm_hooks)))
            comm_stats(ddp)
        except (PolicyError, ConfigError) as error:
            found.append(str(error))
    return found


def test_a_hook_of_the_callers_own_is_kept_or_refused() -> None:
    contradiction = (
        "the policy declares reduce=fp32, and the DistributedDataParallel model has fp16_compress_hook, which sends "
        "fp16. Leave the hook out, or write reduce=fp16."
    )
    uncounted = (
        "reductions are counted for a DistributedDataParallel model that mezzo prepared, and this DistributedDataParallel is "
        "none. Write mezzo.prepare(DistributedDataParallel(model), optimizer, policy)."
    )
    narrow = (
        "the policy declares grads=fp32, and allreduce_hook, a hook of its own, has DistributedDataParallel take gradients in the "
        "dtype of their weights, bf16. Leave the hook out, or grads out of the policy."
    )
    wanted = [contradiction, "1", uncounted, "1", uncounted, narrow]
    assert run(2, _hooks) == [wanted, wanted]


def _connect_again(rank: int, world: int) -> int:
    ddp = DistributedDataParallel(Bare(), find_unused_parameters=True)
    for reduce in ("fp32", "bf16"):
        connect(ddp, Policy.parse(f"fp32, reduce={reduce}"))
    ddp(torch.ones(1, 6)).sum().backward()
    return comm_stats(ddp).payload_bytes


def test_a_later_policy_changes_the_traffic() -> None:
    assert run(2, _connect_again) == [2 * sum(p.numel() for p in Bare().parameters())] * 2


class _Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((around(self), around(self.layer)))
        return self.layer(x)


def _around(rank: int, world: int) -> bool:
    model = _Asks()
    ddp = DistributedDataParallel(model)
    model(torch.ones(1, 1))
    ddp(torch.ones(1, 1))
    return model.seen == [(None, None), (ddp, None)]


def test_a_module_can_tell_who_wraps_it() -> None:
    assert run(2, _around) == [True, True]


def _torchs_own_average(rank: int, world: int) -> bool:
    grads = []
    for connected in (False, True):
        model = Bare()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if connected:
            connect(ddp, Policy.parse("fp32"))
        ddp(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        grads.append(_grads(model))
    return all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_fp32_traffic_gives_the_bits_of_torchs_own_reduction() -> None:
    assert all(run(4, _torchs_own_average))
