"""What of a group's step stays the same from one to the next, kept while every tensor stays where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .._torch import local_tensor
from ..kernels import (
    AUX_STATE,
    PLAIN,
    Layout,
    Weights,
    any_dtensor,
    check_shape,
    global_offset,
    layout_of,
    local_tensors,
    mix,
)
from ..read_only import read_only
from .checks import check_count
from .optimizer_state import mode_of, moment_dtype

Order = tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParamBatch:
    """Parameters of a group that a kernel takes together: one device and dtype.

    Attributes:
        indices: of each in its group.
        orders: of each, the order of dimensions that walks its memory; None if that is the order it has.
        weights: the parameters as a kernel sees them.
        moments: the running means of each by name, laid out as the weights are.
        step: shape (n,), fp32: steps taken by each; "step" in a parameter's state is its element. The one under way is
            counted before a kernel sees it.
        layout: where weights and moments lie; None while torch.compile traces.
    """

    indices: Sequence[int]
    orders: Sequence[Order]
    weights: Weights
    moments: Mapping[str, Sequence[Tensor]]
    step: Tensor
    layout: Layout | None


@dataclass(slots=True, eq=False)
class Active:
    """A parameter with a gradient, and its index in its group."""

    index: int
    label: str
    param: Tensor
    grad: Tensor
    state: dict[str, Any]

    def check(self) -> None:
        """Refuse a gradient, or state that is there already, of another shape than the parameter.

        Raises:
            ConfigError: a step count that is no number.
            OperandError: the first of them.
        """
        check_shape(self.label, "gradient", self.grad, self.param)
        check_count(self.label, self.state.get("step", 0))
        for name, held in self.state.items():
            if name != "step" and isinstance(held, Tensor):
                check_shape(self.label, name, held, self.param)


@read_only
class GroupStep:
    """One group as a step meets it.

    Attributes:
        group: with its options.
        names: of the running means in a parameter's state.
        rule: its numbers, as kernels take them.
        offset: number of the group's first parameter among all parameters.
        grads: of each parameter; None for one that has none.
    """

    group: dict[str, Any]
    names: tuple[str, ...]
    rule: Any
    offset: int
    grads: Sequence[Tensor | None]

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters of the group. Host only."""
        params: Sequence[Tensor] = self.group["params"]
        return params

    @property
    def options(self) -> tuple[object, ...]:
        """What of the group decides over its batches."""
        group = self.group
        return self.offset, self.names, group["master"], group["state_dtype"], group["rounding_seed"]

    def active(self, states: Mapping[Tensor, dict[str, Any]]) -> list[Active]:
        """Return the parameters that have a gradient, with the state that is there. Host only."""
        labels = self.group.get("param_names")
        return [
            Active(index, labels[index] if labels else f"parameter {self.offset + index}", p, grad, states.get(p, {}))
            for index, (p, grad) in enumerate(zip(self.params, self.grads, strict=True))
            if grad is not None
        ]


def batches_of(step: GroupStep, active: Sequence[Active]) -> list[ParamBatch]:
    """Return what the kernels take together of a group.

    Args:
        step: the group.
        active: its parameters with a gradient, their states complete.

    Raises:
        OperandError: something that does not fit its parameter.
        ConfigError: stochastic rounding was asked for a weight that is sharded in a way that hides where its elements
            belong.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Active]] = {}
    for one in active:
        kinds.setdefault((one.param.device, one.param.dtype), []).append(one)
    return [_batch(step, alike) for alike in kinds.values()]


def _batch(step: GroupStep, active: Sequence[Active]) -> ParamBatch:
    group, states, params = step.group, [one.state for one in active], [one.param for one in active]
    orders, mode = memory_orders(params), mode_of(params[0], group)
    is_random = mode == "stochastic" or moment_dtype(params[0], group) is torch.bfloat16
    weights = Weights(
        mode=mode,
        values=aligned(params, orders),
        aux=aligned([state[AUX_STATE[mode]] for state in states], orders) if mode in AUX_STATE else [],
        seeds=[_seed(group["rounding_seed"], step.offset + one.index) if is_random else 0 for one in active],
        offsets=[global_offset(p) for p in params] if is_random and any_dtensor(params) else [],
        labels=[one.label for one in active],
    )
    moments = {name: aligned([state[name] for state in states], orders) for name in step.names}
    return ParamBatch(
        indices=[one.index for one in active],
        orders=orders,
        weights=weights,
        moments=moments,
        step=_bind_counts(states, params[0].device),
        layout=None if torch.compiler.is_compiling() else layout_of(weights, moments),
    )


def _bind_counts(states: Sequence[dict[str, Any]], device: torch.device) -> Tensor:
    """Return the step counts of some parameters as one vector, so that one addition counts a step for all.

    Writes: the entry "step" of each state, which becomes an element of the vector. Syncs: no.
    """
    counts = [torch.as_tensor(state["step"], dtype=torch.float32, device=device).reshape(()) for state in states]
    whole = torch.stack(counts)
    for state, count in zip(states, whole.unbind(), strict=True):
        state["step"] = count
    return whole


def _seed(rounding_seed: int, number: int) -> int:
    """Return the seed of one parameter's random bits, from its number among all parameters."""
    return mix((mix(rounding_seed) + number) & 0xFFFFFFFF)


def memory_order(tensor: Tensor) -> Order:
    """Return the order of dimensions that makes a tensor contiguous; None if it is, or if there is none. Host only.

    >>> memory_order(torch.empty(2, 3)), memory_order(torch.empty(2, 3).t()), memory_order(torch.empty(4, 4)[::2])
    (None, (1, 0), None)
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def memory_orders(tensors: Sequence[Tensor]) -> list[Order]:
    """Return the `memory_order` of each. Host only."""
    if all([tensor.is_contiguous() for tensor in tensors]):
        return [None] * len(tensors)
    return [memory_order(tensor) for tensor in tensors]


def aligned(tensors: Sequence[Tensor], orders: Sequence[Order]) -> Sequence[Tensor]:
    """Return views of tensors of one dtype, dimensions reordered, complex ones as pairs of real numbers.

    Of sharded tensors the parts that lie on this rank. Syncs: no.
    """
    if any([type(t) not in PLAIN for t in tensors]):
        tensors = local_tensors(tensors)
    if any(orders):
        tensors = [t if order is None else t.permute(order) for t, order in zip(tensors, orders, strict=True)]
    return [torch.view_as_real(t) for t in tensors] if tensors and tensors[0].is_complex() else tensors


class KeptBatches:
    """The batches of a group, and what they were made of.

    Args:
        batches: of all its parameters with a gradient.
        step: the group.
        active: the parameters that have one.

    Attributes:
        batches: as given.
    """

    def __init__(self, batches: Sequence[ParamBatch], step: GroupStep, active: Sequence[Active]) -> None:
        self.batches = batches
        params = [one.param for one in active]
        self._options, self._states = step.options, [one.state for one in active]
        self._has_grad = [grad is not None for grad in step.grads]
        self._is_sharded = any_dtensor(params)
        self._tensors = self._all(params)
        self._can_last = all(type(t) in PLAIN for t in self._tensors)
        if self._can_last:
            # State that is held stays in memory, so that nothing else comes to lie where it lies.
            self._held = [t.detach() for t in self._tensors[len(params) :]]
            self._addresses = list(map(Tensor.data_ptr, self._tensors))
            self._sizes = [t.nbytes for t in self._tensors[: len(params)]]
            self._strides = [t.stride() for t in self._tensors[: len(params)] if not t.is_contiguous()]

    def _all(self, params: Sequence[Tensor]) -> list[Any]:
        tensors: list[Any] = [*params, *chain.from_iterable(map(dict.values, self._states))]
        return [local_tensor(t) for t in tensors] if self._is_sharded else tensors

    def fits(self, step: GroupStep) -> bool:
        """Whether the batches are what they would be if they were made anew.

        Parameters and states must lie where they did: somebody may have loaded, moved or replaced them. Plain loops over
        methods of tensors, since this runs in every step. Syncs: no.

        Args:
            step: the group.
        """
        if not self._can_last or step.options != self._options:
            return False
        if [grad is not None for grad in step.grads] != self._has_grad:
            return False
        given = [grad for grad in step.grads if grad is not None]
        if not self._is_sharded and not all([type(grad) is Tensor and grad.layout is torch.strided for grad in given]):
            return False
        active = [p for p, grad in zip(step.params, step.grads, strict=True) if grad is not None]
        tensors = self._all(active)
        return (
            len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and [t.nbytes for t in tensors[: len(active)]] == self._sizes
            and self._lie_as_before(tensors[: len(active)])
        )

    def _lie_as_before(self, params: Sequence[Tensor]) -> bool:
        if not self._strides:
            return all(map(Tensor.is_contiguous, params))
        return [t.stride() for t in params if not t.is_contiguous()] == self._strides
