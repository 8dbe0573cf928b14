"""A step on several ranks: one decision, one norm, one scale, also for sharded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.ranks import run
from tests.step.step_models import Net, batch, mse
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import fully_shard

pytestmark = pytest.mark.distributed


def make(params: Any) -> torch.optim.Optimizer:
    return mezzo.optim.AdamW(params, lr=0.01)


def data(rank: int, world: int, step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step)
    x, y = batch(4 * world)
    return x[rank::world], y[rank::world]


def ddp_run(rank: int, world: int, wrapped_first: bool, fault_at: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: nn.Module = Net(has_batch_norm=False)
    if wrapped_first:
        ddp: nn.Module = DistributedDataParallel(model)
        amp = mezzo.prepare(ddp, make(ddp.parameters()), "fp32, scaling.init_scale=1024")
    else:
        amp = mezzo.prepare(model, make(model.parameters()), "fp32, scaling.init_scale=1024")
        ddp = DistributedDataParallel(amp.model)
    results = []
    for step in range(5):
        x, y = data(rank, world, step)
        amp.zero_grad()
        amp.backward(mse(ddp(x), y))
        if step == fault_at and rank == 1:
            with amp.unscaled_grads() as grads:
                next(iter(grads.values())).fill_(float("inf"))
        result = amp.step(max_norm=1.0)
        results.append((result.applied, result.scale, result.grad_norm if result else 0.0))
    return {"results": results, "weights": {n: p.detach() for n, p in model.named_parameters()}}


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_what_one_rank_finds_all_skip(wrapped_first: bool) -> None:
    """S32: the fault is put into one rank's gradient after they were averaged."""
    one, two = run(2, ddp_run, wrapped_first, 2)
    assert one["results"] == two["results"]
    assert [applied for applied, _, _ in one["results"]] == [True, True, False, True, True]
    assert [scale for _, scale, _ in one["results"]] == [1024, 1024, 1024, 512, 512]
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name])


def stock_disagreement(rank: int, world: int) -> float:
    p = nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale((p * (float("inf") if rank == 1 else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_stock_torch_lets_ranks_disagree() -> None:
    assert run(2, stock_disagreement) == [65536.0, 32768.0]


def one_rank_reference() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net(has_batch_norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(3):
        torch.manual_seed(100 + step)
        x, y = batch(8)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return {"norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def fsdp_run(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net(has_batch_norm=False)
    policy = "fp32, scaling.init_scale=1024"
    fully_shard(model, policy)
    amp = mezzo.prepare(model, make(model.parameters()), policy)
    norms = []
    for step in range(3):
        x, y = data(rank, world, step)
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y))
        norms.append(amp.step(max_norm=0.1).grad_norm)
    amp.zero_grad()
    x, y = data(rank, world, 3)
    amp.backward(mse(amp.model(x), y))
    if rank == 1:
        with amp.unscaled_grads() as grads:
            next(iter(grads.values())).to_local().fill_(float("nan"))
    before = {n: p.to_local().clone() for n, p in amp.model.named_parameters()}
    skipped = not amp.step()
    kept = all(torch.equal(before[n], p.to_local()) for n, p in amp.model.named_parameters())
    weights = {n: p.full_tensor().detach() for n, p in amp.model.named_parameters()}
    return {"norms": norms, "weights": weights, "skipped": skipped, "kept": kept, "scale": amp.scale}


def test_sharded_weights_go_the_way_of_one_rank() -> None:
    want = one_rank_reference()
    for got in run(2, fsdp_run):
        assert got["skipped"] and got["kept"] and got["scale"] == 512.0
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-5)
        for name, value in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], value, rtol=1e-4, atol=1e-5)
