"""What of a group's step stays the same from one to the next, kept while every tensor stays where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..kernels.weights import Weights

_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kind:
    """Parameters of a group that a kernel takes together: one step count, device, and set of dtypes.

    Attributes:
        places: of each in its group.
        orders: of each, the order of dimensions that walks its memory; None if that is the order it has.
        weights: the parameters as a kernel sees them.
        means: the running means of each by name, laid out as the weights are.
        step: shape (), fp32: steps taken; the one under way is counted before a kernel sees it.
    """

    places: Sequence[int]
    orders: Sequence[tuple[int, ...] | None]
    weights: Weights
    means: Mapping[str, Sequence[Tensor]]
    step: Tensor


class Plan:
    """The kinds of a group, and what they were made of.

    Args:
        kinds: of all its parameters with a gradient.
        options: of the group, as far as they decide over kinds.
        params: of the group.
        grads: of each parameter; None for one that has none.
        entries: states of the parameters with a gradient, by name.

    Attributes:
        kinds: as given.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        options: tuple[object, ...],
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        entries: Sequence[dict[str, Any]],
    ) -> None:
        self.kinds = kinds
        self._options, self._entries = options, entries
        self._dtypes = [None if grad is None else grad.dtype for grad in grads]
        active = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        self._sizes = [p.numel() for p in active]
        self._held = self._all(active)
        self._can_last = all(type(t) in _PLAIN and t.is_contiguous() and not t.is_complex() for t in self._held)
        self._addresses = [t.data_ptr() for t in self._held] if self._can_last else []

    def _all(self, params: Sequence[Tensor]) -> list[Any]:
        return [*params, *chain.from_iterable(map(dict.values, self._entries))]

    def fits(self, options: tuple[object, ...], params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Whether the kinds are what they would be if they were made anew.

        Parameters and states must lie where they did, in memory that is held and so is nobody else's: somebody may have
        loaded, moved or replaced them. Plain loops over methods of tensors, since this runs in every step. Syncs: no.

        Args:
            options: of the group, as far as they decide over kinds.
            params: of the group.
            grads: of each parameter.
        """
        if not self._can_last or options != self._options:
            return False
        if [None if grad is None else grad.dtype for grad in grads] != self._dtypes:
            return False
        given = [grad for grad in grads if grad is not None]
        if not all([type(grad) is Tensor and grad.layout is torch.strided for grad in given]):
            return False
        active = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        tensors = self._all(active)
        return (
            len(tensors) == len(self._addresses)
            and [t.data_ptr() for t in tensors] == self._addresses
            and [p.numel() for p in active] == self._sizes
            and all([p.is_contiguous() for p in active])
        )
