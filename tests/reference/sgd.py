"""SGD with momentum after Sutskever et al. 2013, in the form torch documents, in fp64."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class PaperSGD:
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    b: Tensor | None = None

    def step(self, theta: Tensor, gradient: Tensor) -> Tensor:
        g = gradient.double() * (-1 if self.maximize else 1) + self.weight_decay * theta
        if self.momentum:
            self.b = g if self.b is None else self.momentum * self.b + (1 - self.dampening) * g
            g = g + self.momentum * self.b if self.nesterov else self.b
        return theta - self.lr * g
