"""What a skipped step leaves on an accelerator: nothing, of weights, buffers and the state of any optimizer; checks.py runs these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from tests.device import sim
from torch import Tensor, nn

import mezzo


def batch_norms_are_taken_back_at_once() -> None:
    """Twelve of them choose between old and new in as many launches as one; a healthy step and a skipped one."""
    chosen = []
    for count in (1, 12):
        net = nn.Sequential(nn.Linear(8, 8), *(nn.BatchNorm1d(8) for _ in range(count))).to("sim")
        amp = mezzo.prepare(net, torch.optim.AdamW(net.parameters(), fused=True), "bf16, guard.check_every=0")
        for factor in (1.0, 1.0, math.inf):
            amp.zero_grad()
            before = [buffer.cpu() for buffer in net.buffers()]
            amp.backward(net(torch.randn(6, 8).to("sim")).square().mean() * factor)
            with sim.watching() as seen:
                amp.step()
            same = [a.equal(b.cpu()) for a, b in zip(before, net.buffers(), strict=True)]
            assert all(same) if factor == math.inf else not any(same)
        chosen.append(seen.launches["aten::where"])
    assert chosen[0] == chosen[1] == 2, chosen


UNFUSED: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=True),
    "SGD, fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, foreach=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, foreach=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-3, foreach=True),
    "Muon": lambda params: torch.optim.Muon(params, lr=1e-2),
}


def flat_state(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state and options by name, tensors as lists."""
    saved = optimizer.state_dict()
    every = {f"{index} {name}": v for index, entry in saved["state"].items() for name, v in entry.items()}
    every |= {
        f"group {index} {name}": v for index, group in enumerate(saved["param_groups"]) for name, v in group.items()
    }
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in every.items()}


def steps_of_any_optimizer_of_torch_are_undone_on_the_device() -> None:
    """Weights and whole state are those of the CPU, where the host leaves bad steps out: the first, and a later one."""
    for (name, make), policy in itertools.product(UNFUSED.items(), ("bf16", "fp16", "bf16-master, master=fp32")):
        found = []
        for device in ("cpu", "sim"):
            torch.manual_seed(0)
            net = nn.Linear(8, 4, bias=False).to(device)
            optimizer = make(list(net.parameters()))
            wrapped = mezzo.optim.MasterWeights(optimizer) if "master" in policy else optimizer
            amp = mezzo.prepare(net, wrapped, f"{policy}, guard.check_every=0")
            for factor in (math.inf, 1.0, 1.0, math.inf, 1.0):
                amp.zero_grad()
                amp.backward(net(torch.ones(2, 8).to(device)).float().square().mean() * factor)
                with sim.watching() as seen:
                    was_skipped = amp.counters().skipped_in_a_row > 0  # which the step then looks into, and reads
                    amp.step(max_norm=1.0)
                    assert was_skipped or not seen.stops + seen.waits, (name, policy, seen.stops + seen.waits)
                sim.land()
            assert amp.counters().skipped == 2
            found.append(([p.float().tolist() for p in net.parameters()], flat_state(wrapped)))
        assert found[0] == found[1], (name, policy, *found)


class Whitening(torch.optim.SGD):
    """Somebody's own: nobody knows whether it stands a NaN."""


def an_optimizer_that_may_not_stand_nan_is_read_for_once() -> None:
    net = nn.Linear(8, 4).to("sim")
    amp = mezzo.prepare(net, Whitening(net.parameters(), lr=0.1), "bf16, guard.check_every=0")
    amp.backward(net(torch.ones(2, 8, device="sim")).float().square().mean())
    with sim.watching() as seen:
        amp.step()
    assert len(seen.waits) == 1 and not seen.stops
