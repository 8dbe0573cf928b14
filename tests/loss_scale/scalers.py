"""What the tests of the scaler share: optimizers, a network and batches, and how a refusal is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.messages import message_of
from torch import Tensor, nn

from mezzo.errors import ScalerError
from mezzo.loss_scale import GradScaler

Scaler = torch.amp.GradScaler
Make = Callable[..., torch.optim.Optimizer]

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def sgd(*params: nn.Parameter, **arguments: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.5, **arguments)


def one() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def refused(run: Callable[[Scaler], object], kind: type[Exception] = ScalerError, **arguments: Any) -> str:
    """Return the message by which ours refuses what torch's scaler does without a word."""
    run(Scaler("cpu"))
    return message_of(kind, run, GradScaler("cpu", **arguments))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def batches(count: int = 10) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(4, 6, generator=generator)
