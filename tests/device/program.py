"""Prepared runs on the simulated accelerator and on the CPU; test_device.py runs it in a process of its own.

Prints a line of JSON for each run: where the host stopped in its steps, what ran, its losses and those of the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from tests.device import sim
from tests.device.names import LOOKED_AT, RUNS, STEPS
from torch import nn

import mezzo


def torch_adamw(params: Any, policy: str) -> Any:
    inner = torch.optim.AdamW(params, lr=1e-2, fused=True)
    return mezzo.optim.MasterWeights(inner) if policy.endswith("master") else inner


def mezzo_adamw(params: Any, policy: str) -> Any:
    return mezzo.optim.AdamW(params, lr=1e-2, master=_master(policy), backend="reference")


def triton_adamw(params: Any, policy: str) -> Any:
    return mezzo.optim.AdamW(params, lr=1e-2, master=_master(policy), backend="triton")


def mezzo_sgd(params: Any, policy: str) -> Any:
    return mezzo.optim.SGD(params, lr=1e-2, momentum=0.9, master=_master(policy), backend="reference")


def torch_sgd(params: Any, policy: str) -> Any:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def torch_muon(params: Any, policy: str) -> Any:
    """Muon for matrices, and for the rest what it is used with."""
    every = list(params)
    inner = torch.optim.Muon([p for p in every if p.dim() == 2], lr=1e-2)
    muon = mezzo.optim.MasterWeights(inner) if policy.endswith("master") else inner
    return [muon, torch_adamw([p for p in every if p.dim() != 2], policy)]


def _master(policy: str) -> str:
    return {"bf16-master": "split", "fp16-master": "fp32"}.get(policy, "none")


def declared(policy: str, optimizer: str) -> str:
    wrapped = optimizer in ("torch.AdamW", "torch.Muon")
    return "bf16-master, master=fp32" if policy == "bf16-master" and wrapped else policy


OPTIMIZERS: dict[str, Callable[[Any, str], Any]] = {
    "torch.AdamW": torch_adamw,
    "mezzo.AdamW": mezzo_adamw,
    "mezzo.SGD": mezzo_sgd,
    "torch.SGD": torch_sgd,
    "torch.Muon": torch_muon,
    "mezzo.AdamW by Triton": triton_adamw,
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )


def run(device: str, policy: str, optimizer: str, way: str, *, lands: bool = True) -> tuple[list[float], sim.Seen]:
    """Take steps and return their losses, and what ran in those after the first."""
    net = model().to(device)
    alone = "" if device != "cpu" else ", guard.check_every=0"  # what is looked at closely is the device
    amp = mezzo.prepare(net, OPTIMIZERS[optimizer](net.parameters(), policy), declared(policy, optimizer) + alone)
    data = torch.randn(STEPS, 2, 6, 8, generator=torch.Generator().manual_seed(1)).to(device)
    losses, seen = [], sim.Seen()
    for index in range(STEPS):
        with sim.watching() as seen_now:
            amp.zero_grad()
            for x in data[index] if way == "accumulation" else data[index][:1]:
                loss = net(x).float().square().mean()
                amp.backward(loss)
            amp.step(max_norm=0.5 if way == "clip" else None)
        losses.append(loss.detach())
        if lands:
            sim.land()
        if index >= LOOKED_AT:
            seen.launches += seen_now.launches
            seen.stops += seen_now.stops
            seen.waits += seen_now.waits
    assert amp.counters().seen == STEPS
    return torch.stack(losses).tolist(), seen


def main() -> None:
    for policy, optimizer, way in RUNS:
        case: dict[str, Any] = {"case": f"{policy} {optimizer} {way}"}
        try:
            case["cpu"], _ = run("cpu", policy, optimizer, way)
            case["sim"], seen = run("sim", policy, optimizer, way)
            case["stops"], case["waits"], case["launches"] = seen.stops, seen.waits, seen.launches.total()
            if way == "plain":
                case["late"], late = run("sim", policy, optimizer, way, lands=False)
                case["stops"], case["late_waits"] = seen.stops + late.stops, late.waits
        except Exception as error:
            raise RuntimeError(case["case"]) from error
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
