"""Refusing steps that go past the stepper."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._torch import has_step_hooks
from ..errors import StepError
from .foreign_scaler import NO_SCALER, is_called_by_scaler

_handles: weakref.WeakKeyDictionary[Optimizer, tuple[RemovableHandle, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class _Owner(Protocol):
    is_stepping: bool


def is_owned(optimizer: Optimizer) -> bool:
    """Whether a stepper that lives takes the steps of an optimizer."""
    return optimizer in _handles and _handles[optimizer][1]() is not None


def forbid_direct_steps(optimizer: Optimizer, engine: _Owner, stepper: object) -> None:
    """Have an optimizer refuse `step()` unless a stepper's engine calls it, for as long as the engine lives.

    An optimizer that is prepared again belongs to the new stepper.
    """
    reference = weakref.ref(engine)

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        engine = reference()
        if engine is not None and not engine.is_stepping:
            advice = NO_SCALER if is_called_by_scaler() else "Write amp.step()."
            raise StepError(
                f"{type(optimizer).__name__}.step() was called directly, past the guard and on gradients that may carry "
                f"the loss scale. {advice}"
            )

    allow_direct_steps(optimizer)
    _handles[optimizer] = optimizer.register_step_pre_hook(refuse), weakref.ref(stepper)


def allow_direct_steps(optimizer: Optimizer) -> None:
    """Let an optimizer step again whoever calls it. Writes: its hooks."""
    if optimizer in _handles:
        _handles.pop(optimizer)[0].remove()


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers that only pass calls on, such as Accelerate's.

    Raises:
        StepError: none inside has torch's hooks.
    """
    inner = optimizer
    while not has_step_hooks(inner):
        wrapped = getattr(inner, "optimizer", None)
        if not isinstance(wrapped, Optimizer):
            raise StepError(
                f"{type(optimizer).__name__} has no hooks of torch.optim.Optimizer, because its __init__ does not call "
                "super().__init__(params, defaults), so its steps could not be guarded. Add that call, or hand over the "
                "optimizer that it wraps."
            )
        inner = wrapped
    return inner
