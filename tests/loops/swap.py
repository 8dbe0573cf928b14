"""What is swapped between a program in fp32 and the same program under a policy, and the list of programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Amp(Protocol):
    """What a program needs of whoever takes its steps."""

    def backward(self, loss: Tensor, /, *, retain_graph: bool | None = None) -> None: ...
    def step(self, *, max_norm: float | None = None) -> object: ...


class Fp32:
    """The program in plain torch: `loss.backward()`, clipping, `optimizer.step()`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._optimizer = optimizer

    def backward(self, loss: Tensor, /, *, retain_graph: bool | None = None) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self, *, max_norm: float | None = None) -> None:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self._params, max_norm)
        self._optimizer.step()


Prepare = Callable[[nn.Module, Optimizer], Amp]
Program = Callable[[Prepare, int], list[float]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def adam(model: nn.Module, lr: float = 1e-3) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def trained(
    prepare: Prepare, model: nn.Module, optimizer: Optimizer, steps: int, loss_fn: Callable[[], Tensor], *,
    max_norm: float | None = None,
) -> list[float]:  # fmt: skip
    """Run the plainest loop around a loss of one batch; return the losses."""
    amp, losses = prepare(model, optimizer), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn()
        amp.backward(loss)
        amp.step(max_norm=max_norm)
        losses.append(loss.item())
    return losses
