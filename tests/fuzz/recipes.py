"""The optimizers and policies that generated programs choose from, and what plain torch must do to equal them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import mezzo


@dataclass(frozen=True, slots=True)
class Recipe:
    """What plain torch does where a policy is in force.

    Attributes:
        compute: dtype of torch.autocast; None: none.
        scaling: whether the loss is scaled.
        rounds: how masters become 16-bit weights; empty where there are none.
        is_exact: whether torch gives the same bits; else only the fp32 oracle judges.
        output: whether what leaves the model is fp32.
        adopts: whether an optimizer must be one that mezzo takes over.
    """

    compute: torch.dtype | None = None
    scaling: bool = False
    rounds: str = ""
    is_exact: bool = True
    output: bool = True
    adopts: bool = False


BF16, FP16 = torch.bfloat16, torch.float16
POLICIES = {
    "fp32": Recipe(),
    "fp32, scaling.init_scale=1024, scaling.growth_interval=2": Recipe(scaling=True),
    "bf16": Recipe(compute=BF16),
    "bf16, output=none": Recipe(compute=BF16, output=False),
    "bf16, output=none, loss=bf16": Recipe(compute=BF16, output=False),
    "bf16, ops=mezzo": Recipe(compute=BF16, is_exact=False),
    "bf16, *Linear=fp32": Recipe(compute=BF16, is_exact=False),
    "fp16": Recipe(compute=FP16, scaling=True),
    "fp16, scaling.growth_interval=2, scaling.init_scale=256": Recipe(compute=FP16, scaling=True),
    "fp16, output=none": Recipe(compute=FP16, scaling=True, output=False),
    "bf16-master": Recipe(compute=BF16, rounds="away"),
    "bf16-master, master=fp32": Recipe(compute=BF16, rounds="even"),
    "bf16-master, grads=fp32": Recipe(compute=BF16, rounds="away"),
    "bf16-master, master=kahan": Recipe(compute=BF16, is_exact=False),
    "bf16-master, master=stochastic": Recipe(compute=BF16, is_exact=False),
    "bf16-master, state=bf16": Recipe(compute=BF16, is_exact=False, adopts=True),
    "fp16-master": Recipe(compute=FP16, scaling=True, rounds="even"),
    "fp16-master, grads=fp32": Recipe(compute=FP16, scaling=True, rounds="even"),
}


@dataclass(frozen=True, slots=True)
class Maker:
    """An optimizer, and the one of torch that does the same on fp32 weights.

    Attributes:
        make: the optimizer, from parameters.
        plain: torch's; None: the same.
        backend: of mezzo's kernels, where they step; "auto" differs from torch by the rounding of a square root.
        is_adopted: whether it is one of torch's that mezzo's kernels step where weights are 16 bit.
        is_adaptive: whether its steps are of one size, so that a gradient near zero decides their sign.
    """

    make: Callable[[Any], Any]
    plain: Callable[[Any], Any] | None = None
    backend: str = "reference"
    is_adopted: bool = False
    is_adaptive: bool = True

    def takes(self, recipe: Recipe) -> bool:
        """Whether a policy may have this optimizer."""
        return self.is_adopted or not recipe.adopts


def _torch(kind: Any, backend: str = "reference", **options: Any) -> Maker:
    is_adopted = kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    is_adaptive = kind is not torch.optim.SGD
    return Maker(lambda params: kind(params, **options), None, backend, is_adopted, is_adaptive)


def _mezzo(kind: Any, plain: Any, backend: str = "reference", **options: Any) -> Maker:
    return Maker(
        lambda params: kind(params, backend=backend, **options),
        lambda params: plain(params, **options),
        backend,
        is_adaptive=plain is not torch.optim.SGD,
    )


_ADAM = {"lr": 1e-2, "weight_decay": 0.1}
_SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
OPTIMIZERS = {
    "torch.SGD": _torch(torch.optim.SGD, lr=0.05),
    "torch.SGD nesterov": _torch(torch.optim.SGD, **_SGD, nesterov=True),
    "torch.SGD fused": _torch(torch.optim.SGD, **_SGD, fused=True),
    "torch.SGD auto": _torch(torch.optim.SGD, "auto", **_SGD),
    "torch.AdamW": _torch(torch.optim.AdamW, **_ADAM),
    "torch.AdamW auto": _torch(torch.optim.AdamW, "auto", **_ADAM),
    "torch.AdamW foreach": _torch(torch.optim.AdamW, **_ADAM, foreach=True),
    "torch.AdamW fused": _torch(torch.optim.AdamW, **_ADAM, fused=True),
    "torch.AdamW amsgrad": _torch(torch.optim.AdamW, **_ADAM, amsgrad=True),
    "torch.Adam": _torch(torch.optim.Adam, **_ADAM),
    "torch.NAdam": _torch(torch.optim.NAdam, lr=1e-2),
    "torch.RMSprop": _torch(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "torch.Adagrad": _torch(torch.optim.Adagrad, lr=0.05),
    "mezzo.AdamW": _mezzo(mezzo.optim.AdamW, torch.optim.AdamW, **_ADAM),
    "mezzo.AdamW auto": _mezzo(mezzo.optim.AdamW, torch.optim.AdamW, "auto", **_ADAM),
    "mezzo.Adam": _mezzo(mezzo.optim.Adam, torch.optim.Adam, **_ADAM, amsgrad=True),
    "mezzo.SGD": _mezzo(mezzo.optim.SGD, torch.optim.SGD, **_SGD),
    "mezzo.SGD auto": _mezzo(mezzo.optim.SGD, torch.optim.SGD, "auto", **_SGD),
}
