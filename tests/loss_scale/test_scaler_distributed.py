"""The scaler on two ranks: DistributedDataParallel and FSDP2 over gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.distributed.ranks import run
from tests.loss_scale.test_unscale import unscale_
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mezzo.errors import ScalerError
from mezzo.loss_scale import GradScaler
from mezzo.loss_scale.unscale import has_nonfinite

WORLD = 2
pytestmark = pytest.mark.distributed


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, rank: int | None = None) -> Tensor:
    """Return the batch of a step, or one rank's half of it."""
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    return whole if rank is None else whole.chunk(WORLD)[rank]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).pow(2).mean()


def data_parallel(rank: int, _: int) -> None:
    """Buckets, no_sync and clipping are no edits; every rank takes the same decision; weights are one rank's."""
    for as_view in (False, True):
        scaler, single = GradScaler("cpu", 2.0**8, growth_interval=2), GradScaler("cpu", enabled=False)
        model, plain = DistributedDataParallel(network(), gradient_as_bucket_view=as_view), network()
        for net, scale in ((model, scaler), (plain, single)):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
            for step in range(6):
                optimizer.zero_grad(set_to_none=bool(step % 2))
                inputs = batch(step, rank if net is model else None)
                if net is model:
                    with model.no_sync():
                        scale.scale(loss_of(net, inputs)).backward()
                else:
                    loss_of(net, inputs).backward()
                scale.scale(loss_of(net, 2 * inputs)).backward()
                if step == 3:
                    scale.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                scale.step(optimizer)
                scale.update()
        for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert scaler.get_scale() == 2.0**11
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(0, rank))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(ScalerError, match="4 of the 4 gradients of this SGD changed"):
            scaler.step(optimizer)


def overflow_on_one_rank(rank: int, _: int) -> None:
    """DDP reduces the inf to every rank; FSDP2 keeps it in one shard, and the finding is reduced."""
    for sharded in (False, True):
        model: nn.Module = network()
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        else:
            model = DistributedDataParallel(model)
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.125), GradScaler("cpu")
        before = [param.detach().clone() for param in model.parameters()]
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, rank))
            scaler.scale(loss * (float("inf") if step == 0 and rank == 1 and not sharded else 1.0)).backward()
            if sharded and step == 0 and rank == 1:
                gradient = next(model.parameters()).grad
                assert isinstance(gradient, DTensor)
                gradient.to_local().fill_(float("nan"))
            scaler.step(optimizer)
            assert scaler.last_step.applied == (step == 1)
            scaler.update()
            moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert any(moved) == (step == 1)
        assert scaler.get_scale() == 32768.0


def findings_of_shards(rank: int, _: int) -> None:
    """Also where the first gradient is replicated (torch's own check then looks at no other rank), or a shard empty."""
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.randn(4, 3)
    bad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    if rank == 1:
        bad.to_local().fill_(float("inf"))
    grads: list[Tensor] = [
        distribute_tensor(whole * 8.0, mesh, [Replicate()]),
        distribute_tensor(whole * 8.0, mesh, [Shard(0)]),
        distribute_tensor(torch.ones(1), mesh, [Shard(0)]),  # rank 1 holds nothing of it
        torch.full((2,), 8.0),
    ]
    assert float(has_nonfinite(grads)) == 0.0 and float(has_nonfinite([*grads, bad])) == 1.0
    assert float(unscale_([*grads, bad], torch.tensor(8.0))) == 1.0
    torch.testing.assert_close(grads[1].full_tensor(), grads[0].full_tensor(), rtol=0, atol=0)  # type: ignore[attr-defined]
    assert grads[3].tolist() == [1.0, 1.0]


CASES: list[Callable[[int, int], None]] = [data_parallel, overflow_on_one_rank, findings_of_shards]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: Callable[[int, int], None]) -> None:
    """B7."""
    run(WORLD, case)
