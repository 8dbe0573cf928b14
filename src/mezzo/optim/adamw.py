"""AdamW whose weights may be 16 bit and whose updates are fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernels import AdamWRule, Backend, adamw
from ..policy import Master
from .base import MasterOptimizer, Params
from .checks import check_betas, check_bools, check_range, check_rate


class AdamW(MasterOptimizer):
    """torch.optim.AdamW for weights in bf16, fp16 or fp32, with updates in fp32.

    The masters go the way of torch.optim.AdamW on fp32 parameters fed the same gradients, bit for bit on the
    reference backend with fp32 moments. fp32 and fp64 parameters behave as torch's.

    Args:
        params: parameters, groups, or named parameters, as torch's optimizers take them.
        lr: learning rate; a tensor of one element is read on its device in every step.
        betas: decays of the running means of gradients and of their squares.
        eps: added to the root of the mean of squares; applied in fp32, so 1e-8 does not vanish in fp16.
        weight_decay: decoupled decay, applied to the fp32 master.
        amsgrad: divide by the largest mean of squares so far.
        maximize: step up the gradient.
        foreach: accepted for torch's sake; `backend` chooses how a step is computed.
        capturable: accepted: nothing is read by the host. In a graph that is captured a step takes backend="reference".
        differentiable: refused if True.
        fused: accepted for torch's sake; `backend` chooses how a step is computed.
        master: how 16-bit parameters keep small updates: "split" (bf16 only; exact, 2 bytes), "fp32" (exact, 4
            bytes), "kahan" (2 bytes), "stochastic" (0 bytes). None: none, until `mezzo.prepare` gives the policy's.
        state_dtype: of the moments: torch.float32, or torch.bfloat16 rounded stochastically.
        rounding_seed: of that rounding; equal on all ranks of a data-parallel run.
        backend: "auto", or the kernel that must run.

    Raises:
        MasterError: 16-bit trainable parameters without a master mode that exists for them.
        ConfigError: an option out of range, or one that cannot be honoured.

    Source: Loshchilov and Hutter 2019.
    """

    op = "adamw"
    definition = adamw
    decouples_decay = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: Master | None = None,
        state_dtype: torch.dtype = torch.float32,
        rounding_seed: int = 0,
        backend: Backend = "auto",
    ) -> None:
        how = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        check_bools(self, {"amsgrad": amsgrad, "maximize": maximize, **how})
        check_rate(lr)
        check_betas(betas)
        check_range("eps", eps)
        check_range("weight_decay", weight_decay)
        defaults = {
            "lr": lr, "betas": tuple(float(beta) for beta in betas), "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize,
            "master": master, "state_dtype": state_dtype, "rounding_seed": rounding_seed, "backend": backend,
        }  # fmt: skip
        super().__init__(params, defaults)

    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the running means in a parameter's state, which are those of torch.optim.AdamW."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def rule(self, group: Mapping[str, Any]) -> AdamWRule:
        """Return the numbers of a group."""
        beta1, beta2 = group["betas"]
        # as torch's group said that was taken over
        is_decoupled = group.get("decoupled_weight_decay", self.decouples_decay)
        decay, l2 = (group["weight_decay"], 0.0) if is_decoupled else (0.0, group["weight_decay"])
        return AdamWRule(
            beta1=float(beta1), beta2=float(beta2), eps=group["eps"], amsgrad=bool(group["amsgrad"]), l2=l2,
            lr=group["lr"], decay=decay,
        )  # fmt: skip


class Adam(AdamW):
    """torch.optim.Adam for weights in bf16, fp16 or fp32, with updates in fp32: `AdamW` but for its weight decay.

    Args:
        params: parameters, groups, or named parameters, as torch's optimizers take them.
        lr: as in `AdamW`.
        betas: as in `AdamW`.
        eps: as in `AdamW`.
        weight_decay: times the fp32 master, added to the gradient.
        amsgrad: as in `AdamW`.
        options: keyword arguments of `AdamW`, by the same names.

    Raises:
        MasterError: 16-bit trainable parameters without a master mode that exists for them.
        ConfigError: an option out of range, or one that cannot be honoured.

    Source: Kingma and Ba 2015, in torch's form.
    """

    decouples_decay = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
