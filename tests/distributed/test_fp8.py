"""Gradients in blocks of fp8: what rounding takes from one step is in the next, and ranks agree to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from tests.distributed.models import dyadic
from tests.distributed.ranks import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo import Policy
from mezzo.distributed import fully_shard
from mezzo.distributed.ddp import comm_stats, connect
from mezzo.distributed.wide_sum import BLOCK, Fp8Blocks, decode, encode
from mezzo.errors import PolicyError

SCALES = [2.0**-120, 1e-30, 1e-3, 1.0, 447.9, 448.0, 448.1, 1e30]


@pytest.mark.parametrize("scale", SCALES)
def test_a_value_is_rounded_to_three_bits_of_its_own_or_to_the_step_of_its_block(scale: float) -> None:
    values = torch.randn(3, 4 * BLOCK) * torch.logspace(0, -6, 4).repeat_interleave(BLOCK) * scale
    largest = values.view(3, 4, BLOCK).abs().amax(-1).repeat_interleave(BLOCK, dim=1)
    found = decode(encode(values))
    step = (largest / 448 * 2.0**-9).clamp(min=2.0**-136)  # no scale is smaller than 2^-126
    assert ((found - values).abs() <= torch.maximum(values.abs() / 16, step)).all()
    assert torch.equal(decode(encode(found)), found)


def test_a_block_that_is_not_finite_stays_so_and_its_neighbours_too() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        values = torch.ones(1, 3 * BLOCK)
        values[0, BLOCK + 7] = bad
        found = decode(encode(values))
        assert not found[0, BLOCK : 2 * BLOCK].isfinite().any()
        assert torch.equal(found[0, :BLOCK], values[0, :BLOCK]) and torch.equal(
            found[0, 2 * BLOCK :], torch.ones(BLOCK)
        )
    assert not decode(encode(torch.zeros(1, BLOCK))).any()


def test_remainders_are_sent_later() -> None:
    blocks, grad, sent = Fp8Blocks(), torch.randn(2, BLOCK), torch.zeros(2, BLOCK)
    bound = grad.abs().amax() / 8
    for step in range(1, 33):
        sent += decode(blocks.pack(grad.clone()))
        assert (sent - step * grad).abs().max() <= bound  # never more than what one step lost
    blocks.pack(torch.full((2, BLOCK), math.nan))
    assert torch.equal(blocks.pack(grad.clone()), Fp8Blocks().pack(grad.clone())), "nothing of a bad step is left"


def test_a_policy_has_it_for_traffic_alone_and_without_a_scale_that_moves() -> None:
    policy = Policy.parse("bf16, reduce=fp8")
    assert policy.reduce is torch.float8_e4m3fn and Policy.parse(str(policy)) == policy
    assert Policy.from_dict(policy.to_dict()) == policy
    assert Policy.parse("fp16, scaling=1024, reduce=fp8").scaling is not None
    with pytest.raises(PolicyError, match="a loss scale that moves would make wrong; write scaling=none"):
        Policy.parse("fp16, reduce=fp8")
    with pytest.raises(PolicyError, match="grads=fp8 is not a dtype of mixed precision; write fp32, fp16 or bf16"):
        Policy.parse("bf16, grads=fp8")
    with pytest.raises(PolicyError, match="gradients of shards are reduced by torch, which has no blocks"):
        fully_shard(nn.Linear(2, 2), policy)


class _Layers(nn.Module):
    """Enough layers for several buckets, of sizes that are no multiple of a block; the last may be 16 bit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(23, 23, dtype=dtype) for _ in range(4)])
        for index, p in enumerate(self.parameters()):
            p.data = dyadic(*p.shape, seed=index).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


def _step(model: nn.Module, rank: int) -> Tensor:
    model.zero_grad()
    model(dyadic(4, 23, seed=rank)).float().square().sum().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def _many_steps(rank: int, world: int, dtype: torch.dtype) -> tuple[list[Tensor], bool, float]:
    ddp = DistributedDataParallel(_Layers(dtype), bucket_cap_mb=1e-3)
    connect(ddp, Policy.parse("fp32, reduce=fp8"))
    means = [_step(ddp, rank) for _ in range(12)]
    before = comm_stats(ddp).payload_bytes
    _step(ddp, rank)
    sent = comm_stats(ddp).payload_bytes - before
    ddp.zero_grad()
    ddp(dyadic(4, 23, seed=rank) * (math.nan if rank == 1 else 1.0)).float().sum().backward()
    is_bad = all(not p.grad.isfinite().all() for p in ddp.parameters())
    return means, is_bad, sent / sum(p.numel() for p in ddp.parameters())


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
def test_ranks_have_one_mean_that_is_right_on_average(world: int, dtype: torch.dtype) -> None:
    exact = torch.stack([_step(_Layers(dtype), rank) for rank in range(world)]).mean(0)
    found = run(world, _many_steps, dtype)
    size = exact.norm()
    rounding = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps  # of gradients that are stored so
    for means, is_bad, bytes_of_each in found:
        assert all(torch.equal(mean, other) for mean, other in zip(means, found[0][0], strict=True))
        assert all((mean - exact).norm() <= size / 8 for mean in means)
        # The first pass is in buckets of its own, whose remainders are dropped.
        assert (torch.stack(means[1:]).mean(0) - exact).norm() <= size * (2 / 8 / 11 + rounding)
        assert is_bad and bytes_of_each < 1.6, "small buckets are padded to whole blocks"


def _trained(rank: int, world: int, reduce: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), f"bf16, output=fp32, reduce={reduce}")
    ddp = DistributedDataParallel(amp.model)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(40):
        amp.zero_grad()
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        amp.backward(loss)
        amp.step(max_norm=1.0)
        losses.append(loss.item())
    (row,) = [row for row in amp.report().rows if "redu" in str(row)][:1]
    assert reduce in str(row)
    return losses


@pytest.mark.distributed
def test_a_run_ends_where_fp32_traffic_ends() -> None:
    (wide, _), (narrow, _) = run(2, _trained, "fp32"), run(2, _trained, "fp8")
    assert narrow[-1] == pytest.approx(wide[-1], rel=0.1) and wide[-1] < wide[0] / 4
    assert narrow != wide
