"""SGD whose weights may be 16 bit and whose updates are fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..formats import number_of
from ..kernels import Backend, SGDRule, sgd
from ..policy import Master
from .base import MasterOptimizer, Params
from .checks import check_bools, check_range, check_rate


class SGD(MasterOptimizer):
    """torch.optim.SGD for weights in bf16, fp16 or fp32, with updates in fp32.

    The masters go the way of torch.optim.SGD on fp32 parameters fed the same gradients, bit for bit on the
    reference backend with fp32 sums. fp32 and fp64 parameters behave as torch's.

    Args:
        params: parameters, groups, or named parameters, as torch's optimizers take them.
        lr: learning rate; a tensor of one element is read on its device in every step.
        momentum: decay of the running sum of gradients.
        dampening: taken from the weight of new gradients, from the second step on.
        weight_decay: times the fp32 master, added to the gradient.
        nesterov: step along gradient plus momentum times sum.
        maximize: step up the gradient.
        foreach: accepted for torch's sake; `backend` chooses how a step is computed.
        differentiable: refused if True.
        fused: accepted for torch's sake; `backend` chooses how a step is computed.
        master: how 16-bit parameters keep small updates: "split" (bf16 only; exact, 2 bytes), "fp32" (exact, 4
            bytes), "kahan" (2 bytes), "stochastic" (0 bytes). None: none, until `mezzo.prepare` gives the policy's.
        state_dtype: of the running sum: torch.float32, or torch.bfloat16 rounded stochastically.
        rounding_seed: of that rounding; equal on all ranks of a data-parallel run.
        backend: "auto", or the kernel that must run.

    Raises:
        MasterError: 16-bit trainable parameters without a master mode that exists for them.
        ConfigError: an option out of range, or one that cannot be honoured.

    Source: Sutskever et al. 2013, in torch's form.
    """

    op = "sgd"
    definition = sgd
    counts_moments = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master: Master | None = None,
        state_dtype: torch.dtype = torch.float32,
        rounding_seed: int = 0,
        backend: Backend = "auto",
    ) -> None:
        how = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        check_bools(self, {"nesterov": nesterov, "maximize": maximize, **how})
        check_rate(lr)
        check_range("momentum", momentum)
        check_range("weight_decay", weight_decay)
        check_range("dampening", dampening, low=-math.inf)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"nesterov=True was asked with momentum={momentum}, dampening={dampening}: "
                "it looks ahead along undamped momentum. Write momentum > 0 and dampening=0."
            )
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": float(number_of(weight_decay)), "nesterov": nesterov, "maximize": maximize,
            "master": master, "state_dtype": state_dtype, "rounding_seed": rounding_seed, "backend": backend,
        }  # fmt: skip
        super().__init__(params, defaults)

    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name of the running sum in a parameter's state, which is that of torch.optim.SGD."""
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def rule(self, group: Mapping[str, Any]) -> SGDRule:
        """Return the numbers of a group."""
        numbers = {name: group[name] for name in ("weight_decay", "momentum", "lr", "dampening")}
        return SGDRule(**numbers, nesterov=bool(group["nesterov"]))
