"""Sharded weights: `torchrun --standalone --nproc-per-node 2 fsdp2.py`. Without torchrun it is one rank."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mezzo
from mezzo.distributed import fully_shard

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()

policy = mezzo.Policy.parse("bf16-master")
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(3)]
model = nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 1))

fully_shard(model, policy, units=model[1:4])  # first the shards, gathered in the dtypes their ops run in,
optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2)  # then the optimizer of what is left here,
amp = mezzo.prepare(model, optimizer, policy)  # then the policy

target = torch.randn(16, 1)
generator = torch.Generator().manual_seed(1 + rank)
for _ in range(60):
    x = torch.randn(64, 16, generator=generator)
    loss = (model(x) - x @ target).square().mean()
    amp.zero_grad()
    amp.backward(loss)
    amp.step(max_norm=10.0)

held = sum(p.to_local().numel() for p in model.parameters())
print(
    f"rank {rank} of {world}: loss {loss.item():.3f}, holds {held} of {sum(p.numel() for p in model.parameters())} weights"
)
assert loss < 4
dist.destroy_process_group()
