"""AdamW from Loshchilov and Hutter 2019, algorithm 2, and AMSGrad from Reddi et al. 2018, in fp64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class PaperAdamW:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    t: int = 0
    m: Tensor | float = field(default=0.0)
    v: Tensor | float = field(default=0.0)
    v_max: Tensor | None = None

    def step(self, theta: Tensor, gradient: Tensor) -> Tensor:
        g = gradient.double() * (-1 if self.maximize else 1)
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        v = self.v
        if self.amsgrad:
            self.v_max = v = v if self.v_max is None else torch.maximum(self.v_max, v)
        m_hat = self.m / (1 - self.beta1**self.t)
        v_hat = v / (1 - self.beta2**self.t)
        return theta - self.lr * (m_hat / (v_hat.sqrt() + self.eps) + self.weight_decay * theta)
