"""One model, one data set, and the loop with `mezzo.prepare` that every framework must equal bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

import mezzo
from mezzo.distributed import fully_shard

POLICIES = ("bf16", "fp16", "bf16-master")
OVERFLOWING = "fp16, scaling.init_scale=16777216"
EPOCHS, BATCHES, BATCH = 2, 4, 8


@dataclass(frozen=True)
class Case:
    """How a loop differs from the plainest."""

    max_norm: float | None = None
    accumulate: int = 1
    is_resumed: bool = False


CASES = {
    "plain": Case(),
    "clip": Case(max_norm=0.1),
    "accumulate": Case(accumulate=4),
    "resume": Case(max_norm=0.1, is_resumed=True),
}


EVERY_SECOND = [
    pytest.param(policy, case, id=f"{policy}-{name}", marks=[] if (i + j) % 2 == 0 else pytest.mark.slow)
    for i, policy in enumerate(POLICIES)
    for j, (name, case) in enumerate(CASES.items())
]
"""Each case and each policy in the quick suite, but not each with each: for frameworks whose loop takes a second."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    count = BATCHES * BATCH
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, StepLR(optimizer, step_size=1, gamma=0.8)


def shard(model: nn.Module, policy: str, mesh: DeviceMesh | None = None) -> nn.Module:
    fully_shard(model, policy, units=[part for part in model.modules() if isinstance(part, nn.Linear)], mesh=mesh)
    return model


@cache
def expected(policy: str, case: Case, epochs: int = EPOCHS, is_sharded: bool = False) -> dict[str, Tensor]:
    """Weights after the loop with `prepare`, never interrupted."""
    model = shard(make_model(), policy) if is_sharded else make_model()
    optimizer, scheduler = make_optimizer(model)
    amp = mezzo.prepare(model, optimizer, policy)
    amp.on_applied(scheduler.step)
    x, y = make_data().tensors
    for step in range(epochs * BATCHES):
        rows = slice(step % BATCHES * BATCH, (step % BATCHES + 1) * BATCH)
        if isinstance(model, FSDPModule):  # as frameworks do
            model.set_requires_gradient_sync((step + 1) % case.accumulate == 0)
        amp.backward(F.cross_entropy(model(x[rows]), y[rows]) / case.accumulate)
        if (step + 1) % case.accumulate == 0:
            amp.step(max_norm=case.max_norm)
            amp.zero_grad()
    return {"lr": torch.tensor(scheduler.get_last_lr()), **copied(model)}


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights, put together where they are sharded."""
    found = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in found.items()}


def assert_same(model: nn.Module, scheduler: LRScheduler, policy: str, case: Case) -> None:
    """The weights and the learning rate are those of the loop with `prepare`, bit for bit."""
    found = {"lr": torch.tensor(scheduler.get_last_lr()), **copied(model)}
    wanted = expected(policy, case, is_sharded=any(isinstance(p, DTensor) for p in model.parameters()))
    different = [n for n, v in wanted.items() if v.dtype is not found[n].dtype or not torch.equal(v, found[n])]
    assert different == []
    assert not torch.equal(wanted["0.weight"], make_model().state_dict()["0.weight"].to(wanted["0.weight"].dtype))
