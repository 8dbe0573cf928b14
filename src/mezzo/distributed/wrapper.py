"""What spreads a model over ranks, as far as its steps must know: this one, the base, spreads nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .group import Group

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
UNKNOWN = "Their gradients were not averaged: end each no_sync() block before the step's last backward, and do not write weights on one rank only."


class Wrapper:
    """Answers for a model that nothing spreads: whatever the ranks do with it is their own.

    Attributes:
        process_group: of the ranks; None is the default one.
        device: of the model; None where the ranks' own current one is.
        compares_models: whether all ranks hold the same modules and parameters.
        gathers: whether forward and backward gather weights.
    """

    process_group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    compares_models = False
    gathers = False

    def use(self, group: Group) -> None:
        """Take part in a group, whose `timeout` holds."""

    def note_forward(self) -> None:
        """Take note that the model runs forward. Syncs: no."""

    def check_backward(self) -> None:
        """Refuse a backward pass that could not be averaged as the policy says."""

    def check_step(self) -> None:
        """Refuse a step on gradients that were never averaged."""

    def drop(self) -> None:
        """Drop gradients that wait where no optimizer sees them."""

    def end_step(self) -> None:
        """Take note that the gradients so far are spent."""

    def is_another(self, module: nn.Module) -> bool:
        """Whether a module that calls the model is another wrapper than this. Host only."""
        return False

    def has_averaged(self, stepped: Iterable[Tensor]) -> bool:
        """Whether the gradients of all parameters, and of those stepped, were averaged since the last step, as far as can be seen. Host only."""
        return True

    def copied(self, tensors: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """Return those tensors whose keys are parameters that the first rank's were written over, in one order on all. Host only."""
        return []

    def why_apart(self, stepped: Iterable[Tensor]) -> str:
        """Say why weights may differ after a step of some parameters, and what to do. Host only."""
        return UNKNOWN


def living(kind: type[T]) -> list[T]:
    """Return every object of a class in this process, from a walk over all objects: tens of milliseconds. Host only."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def holding(model: nn.Module, kind: type[M]) -> M | None:
    """Return a wrapper of a kind that holds a model, called or not; None if none does. Takes a while."""
    return next((one for one in living(kind) if any(module is model for module in one.modules())), None)
