"""The two scalers, and a model of one weight under a stepper that scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mezzo

Scaler = Any


def stock_scaler() -> Scaler:
    return torch.amp.GradScaler("cpu")


def our_scaler() -> Scaler:
    return mezzo.GradScaler("cpu")


def sgd(*params: nn.Parameter, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=lr)


def prepared(
    weight: Tensor, lr: float = 1.0, more: str = "", make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
) -> tuple[nn.ParameterList, mezzo.Stepper]:
    model = nn.ParameterList([nn.Parameter(weight)])
    return model, mezzo.prepare(model, make(model.parameters(), lr=lr), "fp32, scaling.init_scale=65536" + more)
