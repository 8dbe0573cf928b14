"""Tools that look at a run whose model lies on several ranks: they see this rank's part, or say what to give them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.distributed.ranks import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo import diagnose
from mezzo.errors import ConfigError

pytestmark = pytest.mark.distributed


def _net(kind: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    if kind == "wrapped":
        return DistributedDataParallel(net)
    if kind == "sharded":
        mezzo.distributed.fully_shard(net, "bf16-master")
        return net
    return parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _watched(rank: int, world: int, kind: str, is_watched: bool) -> tuple[list[Tensor], int]:
    net = _net(kind)
    amp = mezzo.prepare(net, mezzo.optim.AdamW(net.parameters(), lr=0.05, master="split"), "bf16-master")
    watch = diagnose.watch(amp, every=1) if is_watched else None
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        amp.zero_grad()
        amp.backward(net(x).float().square().mean())
        amp.step()
    weights = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in amp.export_weights().values()]  # fmt: skip
    if watch is None:
        return weights, 0
    watch.close()
    return weights, len(watch.report.steps)


@pytest.mark.parametrize("kind", ["sharded", "parallel"])
def test_a_watch_samples_the_part_that_lies_here_and_changes_nothing(kind: str) -> None:
    for (found, steps), (wanted, _) in zip(run(2, _watched, kind, True), run(2, _watched, kind, False), strict=True):
        assert steps == 3 and all(map(torch.equal, found, wanted))


def _looked_at(rank: int, world: int, kind: str) -> list[str]:
    net, x, said = _net(kind), torch.ones(4, 6), []
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16")
    net(x).sum().backward()  # DistributedDataParallel holds its group of ranks from here on
    net.zero_grad()
    tools: list[Callable[[], object]] = [
        lambda: diagnose.compare(net, x, policy="bf16", tries=1),
        lambda: diagnose.explain(net, x, policy="bf16"),
        lambda: diagnose.memory(net, amp.optimizers[0], "bf16"),
    ]
    with torch.no_grad():
        net(x)  # an evaluation leaves the weights of the outermost module gathered
    for tool in tools[: 1 if kind == "parallel" else None]:
        try:
            said.append(f"it said {len(str(tool()))} letters")
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind", ["wrapped", "sharded", "parallel"])
def test_tools_look_at_copies_of_what_is_wrapped_and_say_what_to_give_for_parts(kind: str) -> None:
    wanted = {
        "wrapped": "it said ",
        "sharded": "before fully_shard.",
        "parallel": "before parallelize_module or fully_shard.",
    }
    for said in run(2, _looked_at, kind):
        assert all(wanted[kind] in line or "or fully_shard" in line for line in said), said
