"""Models that go wrong in a known place, and a run of them until it stops."""

from __future__ import annotations

import pytest
import torch
from tests.step.step_models import mse
from torch import Tensor, nn

import mezzo
from mezzo.errors import LossScaleExhausted, NonFiniteStep


class FeedForward(nn.Module):
    """Its `down` overflows fp16 in forward, whatever the loss scale; dropout and a counter stand in the way."""

    def __init__(self, factor: float = 1000.0) -> None:
        super().__init__()
        self.stats, self.up, self.down = nn.BatchNorm1d(4), nn.Linear(4, 32), nn.Linear(32, 8)
        self.drop, self.norm, self.head = nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            self.up.weight.mul_(400)
            self.down.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.up(self.stats(x)).relu())
        return self.head(self.norm(self.down(h)))


class Root(nn.Module):
    """A square root whose derivative at 0 is infinite: the loss is finite, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).float().sqrt()


class LogOfZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x).float().relu() * 0).log()


def fail(amp: mezzo.Stepper, x: Tensor, y: Tensor, steps: int = 40) -> BaseException:
    with pytest.raises((NonFiniteStep, LossScaleExhausted)) as caught:
        for _ in range(steps):
            amp.zero_grad()
            amp.backward(mse(amp.model(x), y))
            amp.step()
    return caught.value
