"""Bytes a training step sends, counted by the hook and by the network interface.

    torchrun --standalone --nproc-per-node 2 benchmarks/wire.py

The interface is the loopback of a Linux machine, so leave nothing else that talks over it running.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import comm_stats

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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for reduce in ("fp32", "bf16", "fp16"):
        measure(reduce)
    dist.destroy_process_group()
