"""Calling an optimizer's step by the protocol it speaks."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor
from torch.optim.optimizer import Optimizer

from .._torch import is_fused


def divides_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes scaled gradients and the finding, and skips on the device: torch's fused ones do."""
    return is_fused(optimizer)


def step_scaled(
    optimizer: Optimizer,
    scaler: object,
    grad_scale: Tensor | None,
    found_inf: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step an optimizer that divides gradients itself.

    Args:
        optimizer: one of those that `divides_itself`.
        scaler: all that an optimizer of torch's older protocol gets, whose step takes `grad_scaler`.
        grad_scale: shape (), fp32, what it must divide by; None: its gradients are divided already. A scale that
            the caller put on the optimizer multiplies it.
        found_inf: shape (), fp32; nonzero makes it do nothing.
        args: further arguments of its step.
        kwargs: further keyword arguments of its step.

    Returns:
        What its step returns.

    Writes: the parameters, the optimizer's state, and the gradients.
    Syncs: no.
    """
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return cast(Any, optimizer).step(*args, **kwargs, grad_scaler=scaler)
    own = getattr(optimizer, "grad_scale", None)
    if grad_scale is None:
        grad_scale = own
    elif own is not None:
        grad_scale = grad_scale * own
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf  # type: ignore[attr-defined]  # torch's protocol
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]  # torch's protocol
