"""Optimizers that divide gradients themselves: the one place that hands them scale, clipping and skipping.

The protocol is that of torch's fused optimizers: two attributes that are there for the length of a step. mezzo's own
read a third one, and torch's `GradScaler` drives them by the same two.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..errors import ScalerError, kind_of
from ..read_only import read_only


@read_only
class StepScaling:
    """How one optimizer must read its gradients, and whether it may step.

    Attributes:
        grad_scale: shape (), fp32: divides the gradients; None: they are not scaled.
        clip_coef: shape (), fp32: multiplies after that; None: not clipped. Only mezzo's optimizers read it.
        found_inf: shape (), fp32: anything but 0 leaves everything as it is; None: decided already, step.
        divisor: shape (), fp32: grad_scale over clip_coef, for those who read one number alone; None: not computed yet.
    """

    grad_scale: Tensor | None = None
    clip_coef: Tensor | None = None
    found_inf: Tensor | None = None
    divisor: Tensor | None = None


@contextmanager
def handing(optimizer: Optimizer, scaling: StepScaling) -> Iterator[None]:
    """Have an optimizer that is fused find it inside the block.

    A scale that the caller put on the optimizer multiplies that of the step, as in torch, and is gone afterwards.

    Writes: attributes of the optimizer, for the length of the block. Syncs: no.
    """
    own, scale = getattr(optimizer, "grad_scale", None), scaling.grad_scale
    if own is not None:
        scale = own if scale is None else scale * own
    given = {"grad_scale": scale, "found_inf": scaling.found_inf}
    if scaling.clip_coef is not None:
        given["clip_coef"] = scaling.clip_coef

    def drop() -> None:
        for name in given:
            with suppress(AttributeError):  # interrupted before it was there
                delattr(optimizer, name)

    try:
        for name, value in given.items():
            setattr(optimizer, name, value)
        yield
        drop()
    except BaseException:  # Ctrl-C may have ended that, too
        drop()
        raise


def step_scaled(
    optimizer: Optimizer, scaler: object, scaling: StepScaling, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool | None]:
    """Step a fused optimizer; on the CPU, where reading is free, only if the step is not to be skipped.

    One of torch's older protocol, whose step takes `grad_scaler`, gets the scaler; any other finds `scaling`, with `found_inf`. Returns what its
    step returns, and whether the step was skipped, where the host knows.

    Writes: the parameters, the optimizer's state, and the gradients. Syncs: no.
    """
    assert scaling.found_inf is not None
    is_skipped = bool(scaling.found_inf) if scaling.found_inf.device.type == "cpu" else None
    if is_skipped:
        return None, True
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        warnings.warn(
            f"{type(optimizer).__name__}.step(grad_scaler=...) is torch's older protocol, which torch will drop. Read the "
            "tensors `self.grad_scale` and `self.found_inf` instead.",
            FutureWarning,
            stacklevel=2,
        )
        return cast(Any, optimizer).step(*args, **kwargs, grad_scaler=scaler), is_skipped
    with handing(optimizer, scaling):
        return optimizer.step(*args, **kwargs), is_skipped


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer in the order of its groups. Host only."""
    if not hasattr(optimizer, "param_groups"):
        raise ScalerError(f"an optimizer is wanted, and {kind_of(optimizer)} was given; give one that was made.")
    return [param for group in optimizer.param_groups for param in group["params"]]


def param_names(groups: Sequence[Mapping[str, Any]], offset: int = 0) -> list[str]:
    """Return what errors call the parameters of groups: their names where an optimizer was given names, else their numbers. Host only."""
    names = [name for group in groups for name in group.get("param_names", ())]
    return names or [f"parameter {offset + index}" for index in range(sum(len(group["params"]) for group in groups))]
