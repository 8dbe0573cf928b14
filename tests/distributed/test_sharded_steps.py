"""Steps of sharded models: shards go the way of whole weights, and a fault in one shard is everybody's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.distributed.models import Language
from tests.distributed.ranks import logged, run
from tests.tolerance import relative
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import mezzo
from mezzo.distributed import fully_shard
from mezzo.errors import DistributedError, MasterError, NonFiniteStep, PolicyError

pytestmark = pytest.mark.distributed

INF = float("inf")
State = dict[str, Tensor]
OPTIMIZERS = {
    "adamw": lambda params, master: mezzo.optim.AdamW(params, lr=0.05, weight_decay=0.1, master=master),
    "sgd": lambda params, master: mezzo.optim.SGD(params, lr=0.05, momentum=0.9, master=master),
    "torch": lambda params, _: torch.optim.AdamW(params, lr=0.05),
    "torch-fused": lambda params, _: torch.optim.AdamW(params, lr=0.05, fused=True),
}


class Counted(Language):
    """The language model with statistics that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += self.embed(ids).detach().float().sum((0, 1))
        return super().forward(ids)


def _whole(tensor: Tensor) -> Tensor:
    wide = tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor
    return wide.detach().full_tensor() if isinstance(wide, DTensor) else wide.detach().clone()


def _state(amp: mezzo.Stepper) -> State:
    optimizer, found = amp.optimizers[0], {}
    for name, p in amp.model.named_parameters():
        found[name] = _whole(p)
        found.update({f"{name} {key}": _whole(value) for key, value in optimizer.state[p].items()})
    return found


def _ids(step: int, part: int) -> Tensor:
    return torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(10 * step + part))


def _prepared(world: int, policy: str, optimizer: str, offload: bool = False) -> mezzo.Stepper:
    torch.manual_seed(0)
    model = Counted()
    if world > 1:
        fully_shard(
            model, policy, units=model.layers, offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else None
        )
    master = mezzo.Policy.parse(policy).master
    return mezzo.prepare(model, OPTIMIZERS[optimizer](model.parameters(), master), policy)


def _loss(amp: mezzo.Stepper, ids: Tensor) -> Tensor:
    return F.cross_entropy(amp.model(ids).float().flatten(0, 1), ids.flatten())


def _train(
    rank: int, world: int, policy: str, optimizer: str, max_norm: float | None, offload: bool
) -> tuple[State, list[float]]:
    amp = _prepared(world, policy, optimizer, offload)
    parts, norms = [rank] if world > 1 else [0, 1], []
    for step in range(3):
        amp.zero_grad()
        for part in parts:
            amp.backward(_loss(amp, _ids(step, part)) / len(parts))
        result = amp.step(max_norm=max_norm)
        assert result
        norms.append(result.grad_norm)
    return _state(amp), norms


@pytest.mark.parametrize(
    ("policy", "optimizer", "offload"),
    [
        ("fp32", "adamw", False),
        ("bf16", "adamw", False),
        ("bf16", "adamw", True),
        ("bf16", "sgd", False),
        ("bf16", "torch", False),
        ("fp16, scaling.init_scale=256", "adamw", False),
        ("fp16, scaling.init_scale=256", "torch", False),
        ("bf16-master", "adamw", False),
        ("bf16-master, master=stochastic", "adamw", False),
        ("fp16-master, scaling.init_scale=256", "sgd", False),
    ],
)
def test_shards_go_the_way_of_the_whole_bit_for_bit(policy: str, optimizer: str, offload: bool) -> None:
    wanted, norms = run(1, _train, policy, optimizer, None, False)[0]
    for state, found in run(2, _train, policy, optimizer, None, offload):
        assert [name for name in wanted if not torch.equal(state[name], wanted[name])] == []
        # The norm is summed in another order; its terms are the elements of all gradients.
        assert found == pytest.approx(norms, rel=relative(torch.float32, 2048))


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=256"])
def test_torchs_fused_optimizer_steps_shards(policy: str) -> None:
    # Its CPU kernel rounds the last elements of a tensor otherwise than the first, so where a tensor is cut shows.
    wanted, _ = run(1, _train, policy, "torch-fused", None, False)[0]
    for state, _ in run(2, _train, policy, "torch-fused", None, False):
        for name, value in wanted.items():
            rounding = relative(torch.float32, 3 * 16)  # three steps of less than 16 operations
            torch.testing.assert_close(state[name], value, rtol=rounding, atol=rounding * float(value.abs().max()))


@pytest.mark.parametrize("optimizer", ["adamw", "torch"])
def test_clipping_is_by_the_norm_of_all_shards(optimizer: str) -> None:
    wanted, _ = run(1, _train, "bf16", optimizer, 0.1, False)[0]
    first, second = (state for state, _ in run(2, _train, "bf16", optimizer, 0.1, False))
    for name, value in wanted.items():
        assert torch.equal(first[name], second[name])
        # Three steps, each with a coefficient that is off by the rounding of the norm.
        torch.testing.assert_close(
            first[name], value, rtol=relative(torch.float32, 3 * 2048), atol=relative(torch.float32, 64)
        )


def _faulty(
    rank: int, world: int, policy: str, optimizer: str, fault: str, at: int | None
) -> tuple[State, Tensor, list[bool], list[float]]:
    amp = _prepared(world, policy, optimizer)
    applied, scales = [], []
    for step in range(4):
        if at is None and step == 2:
            continue
        here = rank == 1 and step == at
        amp.zero_grad()
        amp.backward(_loss(amp, _ids(step, rank)) * (INF if here and fault == "loss" else 1.0))
        if step == at and fault == "shard":
            with amp.unscaled_grads() as grads:
                if here:
                    grads["head.weight"].to_local()[0, 0] = INF
        result = amp.step(max_norm=1.0)
        applied.append(result.applied)
        scales.append(result.scale)
    return _state(amp), amp.model.seen.clone(), applied, scales


@functools.cache
def _undisturbed(policy: str, optimizer: str) -> list[Any]:
    return run(2, _faulty, policy, optimizer, "none", None)


@pytest.mark.parametrize("fault", ["shard", "loss"])
@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("bf16", "adamw"), ("bf16-master", "adamw"), ("fp16, scaling.init_scale=256", "torch-fused"), ("bf16", "torch")],
)
def test_a_fault_in_one_shard_is_skipped_by_all_and_leaves_nothing(policy: str, optimizer: str, fault: str) -> None:
    found = run(2, _faulty, policy, optimizer, fault, 2)
    undisturbed = _undisturbed(policy, optimizer)
    for rank, (state, seen, applied, scales) in enumerate(found):
        wanted, wanted_seen, _, _ = undisturbed[rank]
        assert applied == [True, True, False, True]
        assert scales == found[0][3]
        assert torch.equal(seen, wanted_seen)
        assert [name for name in wanted if not torch.equal(state[name], wanted[name])] == []


def _overflows(rank: int, world: int) -> tuple[bool, str | None]:
    amp = _prepared(world, "fp32", "adamw")
    amp.backward(_loss(amp, _ids(0, rank)))
    with amp.unscaled_grads() as grads:
        grads["embed.weight"].to_local().flatten()[0] = 1.5e19  # its square fits fp32, two of them do not
    result = amp.step()
    return result.applied, result.reason


def test_a_norm_that_only_the_sum_overflows_is_skipped() -> None:
    assert run(2, _overflows) == [(False, "gradients")] * 2


def _stops(rank: int, world: int) -> str:
    amp = _prepared(world, "fp32", "adamw")
    for step in range(2):
        amp.zero_grad()
        amp.backward(_loss(amp, _ids(step, rank)))
        if step == 0:
            with amp.unscaled_grads() as grads:
                grads["head.weight"].to_local().fill_(INF)
            if rank == 1:
                with torch.no_grad():
                    amp.model.head.weight.to_local()[0, 0] = INF
        try:
            result = amp.step()
        except NonFiniteStep as error:
            return str(error)
        if rank == 0:
            assert (result.skipped_in_a_row, len(result.nonfinite)) == (1, 1)  # asked on one rank only
    return "went on"


def test_a_bad_shard_on_one_rank_stops_all() -> None:
    first, second = run(2, _stops)
    assert first.startswith("step 0 was skipped, and another rank stops the run: its message says why.")
    assert "inf or NaN in 1 parameter: head.weight (1)" in second


def _bare(rank: int, world: int) -> str:
    model = nn.Linear(4, 4)
    from torch.distributed.fsdp import fully_shard as torchs_own

    torchs_own(model)
    amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), "bf16, output=fp32")
    amp.backward(model(torch.ones(2, 4)).sum())
    reduced = amp.report(strict=True).rows[-1]
    assert (reduced.what, reduced.declared, reduced.observed) == ("reductions", "fp32", (("fp32", 1),))
    return repr(bool(amp.step())) + str(amp.consensus is not None)


def test_torchs_own_sharding_is_accepted_where_it_agrees() -> None:
    assert run(2, _bare) == ["TrueTrue"] * 2


def _accumulates(rank: int, world: int, policy: str) -> State:
    """Return the gradients of three micro-batches on each rank, which wait unaveraged until the last."""
    amp = _prepared(world, policy, "adamw")
    for micro in range(3):
        if world > 1:
            amp.model.set_requires_gradient_sync(micro == 2)
        for part in range(2) if world == 1 else [rank]:
            amp.backward(_loss(amp, _ids(micro, part)) / (6 if world == 1 else 3))
    with amp.unscaled_grads() as grads:
        found = {name: _whole(grad) for name, grad in grads.items()}
    assert amp.step()
    return found


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16, grads=fp32"])
def test_micro_batches_that_wait_are_summed_in_fp32(policy: str) -> None:
    wanted = run(1, _accumulates, policy)[0]
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for grads in run(2, _accumulates, policy):
        for name, value in wanted.items():
            # The same six terms in another order.
            torch.testing.assert_close(grads[name], value, rtol=0, atol=relative(torch.float32, 6) * largest)


def _drops(rank: int, world: int, policy: str, is_dropped: bool) -> State:
    amp = _prepared(world, policy, "adamw")
    if is_dropped:
        amp.model.set_requires_gradient_sync(False)
        for micro in range(2):
            amp.backward(_loss(amp, _ids(micro, rank)))
        amp.zero_grad()
        amp.model.set_requires_gradient_sync(True)
    amp.backward(_loss(amp, _ids(9, rank)))
    with amp.unscaled_grads() as grads:
        return {name: _whole(grad) for name, grad in grads.items()}


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_micro_batches_that_wait_are_dropped_with_the_others(policy: str) -> None:
    wanted = run(2, _drops, policy, False)
    for rank, grads in enumerate(run(2, _drops, policy, True)):
        assert [name for name, grad in wanted[rank].items() if not torch.equal(grads[name], grad)] == []


def _replicas_wait(rank: int, world: int, policy: str, all_reduces: tuple[bool, ...], is_dropped: bool = False) -> Any:
    """Return the gradients of a step whose sums over shards wait for their replicas as told, or why there is none."""
    model = nn.Linear(4, 4)
    fully_shard(model, policy, mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards")))
    amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), policy)
    try:
        for micro, all_reduce in enumerate(all_reduces):
            model.set_requires_all_reduce(all_reduce)
            amp.backward(model(torch.full((2, 4), 2.0**micro + rank)).float().sum())
            if is_dropped and not all_reduce:
                amp.zero_grad()
        with amp.unscaled_grads() as grads:
            found = {name: _whole(grad) for name, grad in grads.items()}
        amp.step()
    except (PolicyError, DistributedError) as error:
        return str(error)
    return found


def test_sums_that_wait_for_their_replicas_are_in_the_step_or_refuse_it() -> None:
    for sums in run(
        2, _replicas_wait, "fp32", (False, True)
    ):  # of 2 rows, each on both ranks and divided by their number
        torch.testing.assert_close(sums["weight"], torch.full((4, 4), 8.0), rtol=0, atol=0)
    for sums in run(2, _replicas_wait, "fp32", (False, True), True):
        torch.testing.assert_close(sums["weight"], torch.full((4, 4), 5.0), rtol=0, atol=0)
    said = (
        "step() was called while gradients of 'the root' wait on their own rank: the last backward of this step ran under "
        "set_requires_all_reduce(False). Write set_requires_all_reduce(True) before the last one."
    )
    assert run(2, _replicas_wait, "fp32", (True, False)) == [said] * 2
    for found in run(2, _replicas_wait, "bf16, reduce=bf16", (False, True)):
        assert (
            "set_requires_all_reduce(False) was called on 'the root', whose weights are fp32, and torch sums" in found
        )


def _asks_for_what_cannot_be(rank: int, world: int, policy: str, optimizer: str, waits: bool) -> str:
    model = nn.Linear(4, 4)
    fully_shard(model, policy)
    wrapped = mezzo.optim.MasterWeights(torch.optim.AdamW(model.parameters()))
    made = (
        wrapped
        if optimizer == "wrapped"
        else OPTIMIZERS[optimizer](model.parameters(), mezzo.Policy.parse(policy).master)
    )
    try:
        amp = mezzo.prepare(model, made, policy)
        model.set_requires_gradient_sync(not waits)
        amp.backward(model(torch.ones(2, 4)).float().sum())
        amp.step()
    except (PolicyError, MasterError, DistributedError) as error:
        return str(error)
    return "done"


@pytest.mark.parametrize(
    ("policy", "optimizer", "waits", "sentence"),
    [
        ("bf16, reduce=bf16", "adamw", True, "set_requires_gradient_sync(False) was called on 'the root', whose weights are fp32, and torch sums gradients that wait in the dtype of what is sent, reduce=bf16. Average every micro-batch, which is then summed in fp32, or write reduce=fp32 in the policy."),
        ("bf16", "adamw", True, "step() was called while gradients of 'the root' wait on their own rank: the last backward of this step ran under set_requires_gradient_sync(False). Write set_requires_gradient_sync(True) before the last one."),
        ("fp32", "adamw", True, "step() was called while gradients of 'the root' wait"),
        ("bf16-master, grads=fp32", "adamw", False, "the policy declares grads=fp32, and torch gives the 2 sharded parameters that are stored in 16 bit (weight, ...) gradients of their own dtype. Leave grads out, and sum micro-batches in fp32 before they are rounded: model.set_requires_gradient_sync(False) for all but the last of a step."),
        ("bf16-master, master=fp32", "wrapped", False, "MasterWeights was given the sharded parameter"),
        ("bf16-master, reduce=bf16", "adamw", False, "done"),
        ("fp32", "wrapped", False, "done"),
    ],
)  # fmt: skip
def test_what_torch_would_sum_or_step_otherwise_is_refused(
    policy: str, optimizer: str, waits: bool, sentence: str
) -> None:
    for found in run(2, _asks_for_what_cannot_be, policy, optimizer, waits):
        assert sentence in found


def _still(rank: int, world: int, is_empty: bool) -> tuple[str, list[str]]:
    """Train for more steps than weights may stay what they are, where the second rank's shard is empty, or in rows that no batch has."""
    net = nn.Linear(6, 1, bias=False) if is_empty else nn.Embedding(8, 1)
    fully_shard(net, "fp32")
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), "fp32, guard.check_every=1")
    with logged() as said:
        try:
            for _ in range(102):
                amp.zero_grad()
                amp.backward((net(torch.randn(4, 6) if is_empty else torch.arange(4)) - 1).square().mean())
                amp.step()
        except mezzo.errors.MezzoError as error:
            return str(error), said
    return "trained", said


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_shard_without_gradients_has_nothing_to_move(is_empty: bool) -> None:
    assert run(2, _still, is_empty) == [("trained", [])] * 2
