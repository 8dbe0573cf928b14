"""What of a group's step stays the same from one to the next, kept while every tensor stays where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..kernels.dtensor import PLAIN, any_dtensor, global_offset
from ..kernels.ops.rounding import mix
from ..kernels.weights import AUX_STATE, Weights
from .layout import Order, aligned, memory_orders
from .optimizer_state import mode_of, moment_dtype


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParamBatch:
    """Parameters of a group that a kernel takes together: one step count, device, and set of dtypes.

    Attributes:
        indices: of each in its group.
        orders: of each, the order of dimensions that walks its memory; None if that is the order it has.
        weights: the parameters as a kernel sees them.
        means: the running means of each by name, laid out as the weights are.
        step: shape (), fp32: steps taken; the one under way is counted before a kernel sees it.
    """

    indices: Sequence[int]
    orders: Sequence[Order]
    weights: Weights
    means: Mapping[str, Sequence[Tensor]]
    step: Tensor


@dataclass(slots=True, eq=False)
class Active:
    """A parameter with a gradient, and its place in its group."""

    index: int
    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]


def param_batches_of(
    group: Mapping[str, Any], names: Sequence[str], offset: int, active: Sequence[Active]
) -> list[ParamBatch]:
    """Return the kinds of a group.

    Args:
        group: with its options.
        names: of the running means in a parameter's state.
        offset: number of the group's first parameter among all parameters.
        active: its parameters with a gradient, their states complete.

    Raises:
        ConfigError: stochastic rounding was asked for a weight that is sharded in a way that hides where its elements belong.
    """
    kinds: dict[tuple[int, torch.dtype, torch.dtype], list[Active]] = {}
    for one in active:
        kinds.setdefault((id(one.state["step"]), one.param.dtype, one.grad.dtype), []).append(one)
    return [_kind(group, names, offset, alike) for alike in kinds.values()]


def _kind(group: Mapping[str, Any], names: Sequence[str], offset: int, active: Sequence[Active]) -> ParamBatch:
    states, params = [one.state for one in active], [one.param for one in active]
    orders = memory_orders(params)
    mode = mode_of(params[0], group)
    chance = mode == "stochastic" or moment_dtype(params[0], group) is torch.bfloat16
    return ParamBatch(
        indices=[one.index for one in active],
        orders=orders,
        weights=Weights(
            mode=mode,
            values=aligned(params, orders),
            aux=aligned([state[AUX_STATE[mode]] for state in states], orders) if mode in AUX_STATE else [],
            seeds=[_seed(group["rounding_seed"], offset + one.index) if chance else 0 for one in active],
            offsets=[global_offset(p) for p in params] if chance and any_dtensor(params) else [],
        ),
        means={name: aligned([state[name] for state in states], orders) for name in names},
        step=states[0]["step"],
    )


def _seed(rounding_seed: int, number: int) -> int:
    """Return the seed of one parameter's random bits, from its number among all parameters."""
    return mix((mix(rounding_seed) + number) & 0xFFFFFFFF)


class Plan:
    """The kinds of a group, and what they were made of.

    Args:
        kinds: of all its parameters with a gradient.
        options: of the group, as far as they decide over kinds.
        grads: of each parameter; None for one that has none.
        active: the parameters that have one.

    Attributes:
        kinds: as given.
    """

    def __init__(
        self,
        kinds: Sequence[ParamBatch],
        options: tuple[object, ...],
        grads: Sequence[Tensor | None],
        active: Sequence[Active],
    ) -> None:
        params = [one.param for one in active]
        self.kinds = kinds
        self._options, self._entries = options, [one.state for one in active]
        self._dtypes = [None if grad is None else grad.dtype for grad in grads]
        self._sizes = [p.numel() for p in params]
        self._held = self._all(params)
        self._can_last = all(type(t) in PLAIN and t.is_contiguous() and not t.is_complex() for t in self._held)
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
