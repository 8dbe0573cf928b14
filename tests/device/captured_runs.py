"""Prepared models whose step can be captured, for graphs.py and graph_refusals.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.device.program import OPTIMIZERS, declared
from torch import Tensor, nn

import mezzo

DATA = torch.randn(14, 2, 6, 8, generator=torch.Generator().manual_seed(1))
SCALING = ", scaling.init_scale=1024, scaling.growth_interval=2"


def capturable_adamw(params: Any, policy: str) -> Any:
    inner = torch.optim.AdamW(params, lr=1e-2, fused=True, capturable=True)
    return mezzo.optim.MasterWeights(inner) if policy.endswith("master") else inner


def capturable_adam(params: Any, policy: str) -> Any:
    """One that cannot leave out a step by itself."""
    inner = torch.optim.Adam(params, lr=1e-2, foreach=True, capturable=True)
    return mezzo.optim.MasterWeights(inner) if policy.endswith("master") else inner


KINDS: dict[str, Callable[[Any, str], Any]] = {
    "torch.AdamW": capturable_adamw,
    "torch.Adam": capturable_adam,
    "mezzo.AdamW": OPTIMIZERS["mezzo.AdamW"],
    "mezzo.SGD": OPTIMIZERS["mezzo.SGD"],
    "torch.SGD": OPTIMIZERS["torch.SGD"],
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Linear(16, 4),
    )  # fmt: skip


class Run:
    """A prepared model and the function that takes its step."""

    def __init__(self, policy: str, kind: str, way: str = "plain", net: nn.Module | None = None, device: str = "sim"):
        self.net = (model() if net is None else net).to(device)
        scaling = SCALING if policy.startswith("fp16") else ""
        words = declared(policy, kind) if kind == "torch.AdamW" else policy
        if policy == "bf16-master" and kind in ("torch.SGD", "torch.Adam"):
            words = "bf16-master, master=fp32"
        self.optimizer = KINDS[kind](self.net.parameters(), policy)
        self.amp = mezzo.prepare(self.net, self.optimizer, words + scaling)
        self.way = way

    def step(self, x: Tensor, factor: Tensor) -> tuple[Tensor, mezzo.StepResult]:
        self.amp.zero_grad()
        for part in x.unbind() if self.way == "accumulation" else x[:1].unbind():
            loss = self.net(part).float().square().mean() * factor
            self.amp.backward(loss)
        return loss.detach(), self.amp.step(max_norm=0.5 if self.way == "clip" else None)

    def state(self) -> list[Any]:
        counters, scale = self.amp.counters(), self.amp.scale
        tensors = [*self.net.parameters(), *self.net.buffers()]
        tensors += [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
        return [counters, scale, *(tensor.float().tolist() for tensor in tensors)]
