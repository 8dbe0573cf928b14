"""A run on two ranks that stops: each says what its own batch shows, and none waits for the other."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.ranks import run
from tests.step.replay_models import FeedForward
from tests.step.step_models import batch, mse
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import fully_shard
from mezzo.errors import NonFiniteStep

pytestmark = pytest.mark.distributed


def stopped(rank: int, world: int, kind: str) -> tuple[str, str | None]:
    """Return the message, and the module that is blamed, or why; None without a finding."""
    torch.manual_seed(0)
    model = FeedForward(factor=1.0 if kind == "input" else 1000.0)
    policy = "fp16, output=fp32, guard.patience=3"
    if kind == "sharded":
        fully_shard(model, policy)
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
        root = model
    else:
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), policy)
        root = DistributedDataParallel(model)
    torch.manual_seed(rank)
    for _ in range(6):
        x, y = batch()
        if kind == "input" and rank == 0:
            x[0, 0] = float("nan")
        amp.zero_grad()
        amp.backward(mse(root(x), y))
        try:
            amp.step()
        except NonFiniteStep as error:
            faults = [] if error.report is None else error.report.faults
            return str(error), (faults[0].why if kind == "input" else faults[0].module) if faults else None
    return "went on", None


def test_both_name_what_overflowed() -> None:
    for message, module in run(2, stopped, "ddp"):
        assert module == "down" and "overflow in addmm, forward, module down" in message


def test_the_rank_with_the_bad_batch_names_it() -> None:
    (one, fault), (two, other) = run(2, stopped, "input")
    assert fault is not None and "already holds 1 NaN" in fault
    assert other is None and one.startswith("3 steps in a row") and two.startswith("3 steps in a row")
    assert "mezzo.diagnose.trace(model) names the op" in two, "its own batch is healthy"


def test_sharded_weights_are_not_run_again() -> None:
    for message, module in run(2, stopped, "sharded"):
        assert module is None and "mezzo.diagnose.trace(model) names the op" in message
