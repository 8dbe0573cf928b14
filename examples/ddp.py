"""Copies on several ranks: `torchrun --standalone --nproc-per-node 2 ddp.py`. Without torchrun it is one rank."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
amp = mezzo.prepare(model, optimizer, "bf16-master, reduce=bf16")  # gradients travel in bf16 too
wrapped = DistributedDataParallel(amp.model)

target = torch.randn(16, 1)
generator = torch.Generator().manual_seed(1 + rank)
for step in range(120):
    x = torch.randn(64, 16, generator=generator)
    if step == 60 and rank == world - 1:
        x[0, 0] = float("nan")  # a bad batch on one rank: every rank leaves this step out
    loss = (wrapped(x) - x @ target).square().mean()
    amp.zero_grad()
    amp.backward(loss)
    amp.step(max_norm=10.0)

counters = amp.counters()
print(f"rank {rank} of {world}: loss {loss.item():.3f}, {counters.applied} steps taken, {counters.skipped} skipped")
assert loss < 2 and counters.skipped == 1
dist.destroy_process_group()
