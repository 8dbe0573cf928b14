"""Sums over micro-batches in fp32, for 16-bit weights whose gradients DistributedDataParallel keeps in 16 bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import DistributedError
from ..formats import LOW_DTYPES
from ..stamp import Stamp, version_of

_summed_apart = WeakTensorKeyDictionary()


def is_summed_apart(param: Tensor) -> bool:
    """Whether micro-batches of a parameter are summed in fp32 beside its gradient, which is 16 bit. Host only."""
    return param in _summed_apart


@dataclass(slots=True, eq=False)
class _Sum:
    """The micro-batches of one parameter so far, and the emptied gradient they were taken from."""

    value: Tensor
    stamp: Stamp

    def continues(self, grad: Tensor, passes: int) -> bool:
        """Whether a gradient is the one that was emptied, with so many backward passes added since."""
        return self.stamp.is_of(grad) and version_of(grad) == self.stamp.version + passes


class Accumulator:
    """Keeps what unsynchronised micro-batches add to 16-bit gradients, in fp32, until the gradients are averaged.

    DistributedDataParallel wants gradients in the dtype of their weights. A 16-bit sum stops absorbing terms
    after a few dozen micro-batches, so each micro-batch is taken out of the gradient as soon as it is there.

    Args:
        params: those that are 16 bit are accumulated; the others are none of its business.
        is_averaging: whether the backward pass under way ends in an average over the ranks.

    Writes: `grad_dtype` of 16-bit parameters, which becomes their own.
    """

    def __init__(self, params: Iterable[Tensor], is_averaging: Callable[[], bool]) -> None:
        self._is_averaging = is_averaging
        self._sums: dict[Tensor, _Sum] = {}
        for p in params:
            if p.requires_grad and p.dtype in LOW_DTYPES:
                p.grad_dtype = p.dtype
                _summed_apart[p] = True
                p.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]  # torch's own

    @torch.no_grad()
    def _collect(self, param: Tensor) -> None:
        grad = param.grad
        if grad is None or self._is_averaging():
            return
        before = self._sums.get(param)
        wide = grad.to(torch.float32)
        if before is not None and before.continues(grad, passes=1):
            wide += before.value
        grad.zero_()
        self._sums[param] = _Sum(wide, Stamp.of(grad))

    def take(self, param: Tensor) -> Tensor | None:
        """Return the sum of a parameter's earlier micro-batches, once: its shape, fp32. None if there were none.

        Called when the last micro-batch has been added to the emptied gradient. Host only.
        """
        before = self._sums.pop(param, None)
        grad = param.grad
        is_own = before is not None and grad is not None and before.continues(grad, passes=1)
        return before.value if before is not None and is_own else None

    def check_averaged(self) -> None:
        """Refuse a step on gradients that were never averaged.

        Raises:
            DistributedError: every backward pass of the step ran inside no_sync().
        """
        waiting = [p for p, kept in self._sums.items() if p.grad is not None and kept.continues(p.grad, passes=0)]
        if waiting:
            raise DistributedError(
                f"step() was called with the gradients of {len(waiting)} parameters still on their own rank: every "
                "backward of this step ran inside no_sync(). Run the last one outside of it."
            )
