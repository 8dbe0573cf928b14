"""What the tests of the scaler's refusals share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.errors import ScalerError
from mezzo.loss_scale import GradScaler

Scaler = torch.amp.GradScaler
Make = Callable[..., torch.optim.Optimizer]


def sgd(*params: nn.Parameter, **arguments: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.5, **arguments)


def one() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def refused(run: Callable[[Scaler], object], kind: type[Exception] = ScalerError, **arguments: Any) -> str:
    """Return the message by which ours refuses what torch's scaler does without a word."""
    run(Scaler("cpu"))
    with pytest.raises(kind) as refusal:
        run(GradScaler("cpu", **arguments))
    return str(refusal.value)
