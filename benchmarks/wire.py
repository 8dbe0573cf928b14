"""Bytes a training step sends, counted by the hook and by the network interface; and what 16-bit sums cost.

    torchrun --standalone --nproc-per-node 2 benchmarks/wire.py
    python benchmarks/wire.py                                     # the errors of sums over many ranks, simulated

The interface is the loopback of a Linux machine, so leave nothing else that talks over it running.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import comm_stats
from mezzo.distributed.wide_sum import Fp8Blocks

STEPS = 50


def sent_by_interface() -> int:
    """Return the bytes that the loopback interface has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(reduce: str) -> None:
    """Print what a step of each rank sends."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), f"bf16, reduce={reduce}, guard.check_every=0")
    ddp = DistributedDataParallel(amp.model)
    for step in range(STEPS + 5):
        if step == 5:  # the first steps set up connections and compare ranks
            dist.barrier()
            before, counted = sent_by_interface(), comm_stats(ddp).payload_bytes
        amp.zero_grad()
        amp.backward(ddp(torch.randn(8, 256)).float().square().mean())
        amp.step()
    dist.barrier()
    after, sent = sent_by_interface(), comm_stats(ddp)
    if dist.get_rank() == 0:
        payload = (sent.payload_bytes - counted) // STEPS
        ring = 2 * (sent.num_ranks - 1) * payload // sent.num_ranks
        wire = (after - before) / STEPS / sent.num_ranks
        print(f"reduce={reduce}  ranks {sent.num_ranks}  payload {payload}  ring {ring}  interface {wire:.0f}")


def errors(dtype: torch.dtype, num_ranks: int, num_shards: int = 1) -> tuple[float, float]:
    """Return the error of a mean over ranks against fp64, relative to its size: rounded at each rank, and summed in fp32.

    With shards each rank stands for a replica, which sends on the mean over its shards, summed in fp32 and rounded.
    """
    generator = torch.Generator().manual_seed(num_ranks)
    common = torch.randn(4096, generator=generator, dtype=torch.float64)
    grads = common + 0.5 * torch.randn(num_ranks, num_shards, 4096, generator=generator, dtype=torch.float64)
    means = grads[:, 0].float() if num_shards == 1 else grads.to(dtype).mean(1, dtype=torch.float32).to(dtype).float()
    shares, exact = (means / num_ranks).to(dtype), grads.mean((0, 1))
    ring = shares[0]
    for share in shares[1:]:
        ring = ring + share
    wide = shares.sum(0, dtype=torch.float32).to(dtype)
    return tuple(((mean.double() - exact).norm() / exact.norm()).item() for mean in (ring, wide))


def errors_in_blocks(num_ranks: int, steps: int) -> float:
    """Return the error of the mean over ranks and so many steps of one gradient in blocks of fp8, as in `errors`."""
    generator = torch.Generator().manual_seed(num_ranks)
    common = torch.randn(4096, generator=generator, dtype=torch.float64)
    grads = common + 0.5 * torch.randn(num_ranks, 4096, generator=generator, dtype=torch.float64)
    ranks, total, owner = [Fp8Blocks() for _ in range(num_ranks)], torch.zeros(4096), Fp8Blocks()
    for _ in range(steps):
        packed = [one.pack((grad.float() / num_ranks).view(1, -1)) for one, grad in zip(ranks, grads, strict=True)]
        mean = owner.pack_sum(owner.add_up(torch.cat(packed)))
        total += owner.unpack(mean.view(1, -1))[0]
    exact = grads.mean(0)
    return (((total / steps).double() - exact).norm() / exact.norm()).item()


def gradients(policy: str, data: torch.Tensor) -> torch.Tensor:
    """Return the gradients of a small transformer for the batch of one rank, as one vector."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Linear(32, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 8)
    )
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), f"{policy}, guard.check_every=0")
    amp.backward(model(data).float().square().mean())
    return torch.cat([p.grad.float().reshape(-1) for p in model.parameters()])


def presets(num_ranks: int = 8) -> None:
    """Print how far the mean gradient of a real model is from fp32's, by what it is computed and sent in."""
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(num_ranks, 4, 64, 32, generator=generator)
    exact = torch.stack([gradients("fp32", data) for data in batches])
    mean = exact.mean(0)
    noise = ((exact - mean).norm(dim=1).mean() / mean.norm()).item()
    print(f"mean over {num_ranks} ranks; a rank's own gradient is {noise:.2g} away from it")
    for compute in ("fp32", "bf16"):
        own = torch.stack([gradients(compute, data) for data in batches])
        narrow = (own / num_ranks).bfloat16().sum(0, dtype=torch.float32).bfloat16().float()
        for sent, found in (("fp32", own.mean(0)), ("bf16", narrow)):
            print(f"computed in {compute}, sent in {sent}: {((found - mean).norm() / mean.norm()).item():.2g}")


if __name__ == "__main__" and not dist.is_torchelastic_launched():
    for dtype, num_ranks in itertools.product((torch.bfloat16, torch.float16), (4, 64, 256, 1024)):
        ring, wide = errors(dtype, num_ranks)
        print(f"{dtype}  ranks {num_ranks:4}  ring {ring:.2g}  fp32 sums {wide:.2g}")
    for num_ranks in (4, 16, 64):
        ring, wide = errors(torch.bfloat16, num_ranks, 8)
        print(f"torch.bfloat16  replicas {num_ranks:2} of 8 shards  ring {ring:.2g}  fp32 sums {wide:.2g}")
    for num_ranks, steps in itertools.product((4, 64), (1, 10, 100)):
        print(f"blocks of fp8  ranks {num_ranks:4}  mean over {steps:3} steps {errors_in_blocks(num_ranks, steps):.2g}")
    presets()
elif __name__ == "__main__":
    dist.init_process_group("gloo")
    for reduce in ("fp32", "bf16", "fp16", "fp8"):
        measure(reduce)
    dist.destroy_process_group()
