"""Refusing steps that go past the stepper."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import StepError

_handles: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


class _Owner(Protocol):
    is_stepping: bool


def forbid_direct_steps(optimizer: Optimizer, owner: _Owner) -> None:
    """Have an optimizer refuse `step()` unless its owner calls it, for as long as the owner lives.

    An optimizer that is prepared again belongs to the new stepper.
    """
    reference = weakref.ref(owner)

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owner = reference()
        if owner is not None and not owner.is_stepping:
            raise StepError(
                f"{type(optimizer).__name__}.step() was called directly, past the guard and on gradients that may carry "
                "the loss scale. Write amp.step()."
            )

    before = _handles.pop(optimizer, None)
    if before is not None:
        before.remove()
    _handles[optimizer] = optimizer.register_step_pre_hook(refuse)
