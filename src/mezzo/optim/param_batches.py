"""What of a group's step stays the same from one to the next, kept while every tensor stays where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from ..errors import ConfigError
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
    param_seed,
)
from ..kernels.operands import Operand
from ..loss_scale import param_names
from .checks import check_count
from .optimizer_state import mode_of, moment_dtype

Order = tuple[int, ...] | None
_LATER = "max_exp_avg_sq"
"""What begins when amsgrad is switched on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParamBatch:
    """Parameters of a group that a kernel takes together: one device and dtype.

    Attributes:
        indices: of each in its group.
        orders: of each, the order of dimensions that walks its memory; None if that is the order it has.
        needs_views: whether kernels see gradients through views: reordered, of complex ones, or the parts on this rank.
        weights: the parameters as a kernel sees them.
        moments: the running means of each by name, laid out as the weights are.
        step: shape (n,), fp32: steps taken by each; "step" in a parameter's state is its element. The one under way is
            counted before a kernel sees it.
        counts: the same memory as an array of the host, which counts without a tensor op; None where it is not the host's.
        layout: where weights and moments lie; None while torch.compile traces.
    """

    indices: Sequence[int]
    orders: Sequence[Order]
    needs_views: bool
    weights: Weights
    moments: Mapping[str, Sequence[Tensor]]
    step: Tensor
    counts: Any
    layout: Layout | None


@dataclass(slots=True, eq=False)
class Active:
    """A parameter with a gradient, and its index in its group."""

    index: int
    name: str
    param: Tensor
    grad: Tensor
    state: dict[str, Any]

    def check(self, moments: Sequence[str]) -> None:
        """Refuse a gradient, or state that is there already, of another shape than the parameter, and one that is no memory of its own.

        Raises:
            ConfigError: a step count that is no number, or one without the `moments` that it cannot do without.
            OperandError: the first of them.
        """
        if not torch.compiler.is_compiling() and (self.param.is_conj() or self.param.is_neg()):
            reason = "a view that is conjugated or negated when it is read"
            raise Operand(self.name, "weight", self.param).refuse(self.param, reason)
        check_shape(self.name, "gradient", self.grad, self.param)
        check_count(self.name, self.state.get("step", 0))
        gone = [name for name in moments if name not in self.state and name != _LATER]
        if gone and float(self.state.get("step", 0)) > 0:
            raise ConfigError(
                f"the state of {self.name} counts steps and has no {gone[0]}, which would begin at 0 as if it had taken none. Delete "
                "optimizer.state[parameter] to begin anew, or load the whole state."
            )
        for key, held in self.state.items():
            if key != "step" and isinstance(held, Tensor):
                check_shape(self.name, key, held, self.param)


@dataclass(kw_only=True, slots=True, eq=False)
class GroupStep:
    """One group as a step meets it, or neighbours whose options agree, which are stepped as one.

    Attributes:
        group: with the options of all.
        groups: all of them.
        options: what decides over its batches.
        names: of the running means in a parameter's state.
        rule: its numbers, as kernels take them.
        offset: number of the first parameter among all parameters.
        params: of all groups.
        grads: of each parameter; None for one that has none.
    """

    group: dict[str, Any]
    groups: list[dict[str, Any]] = field(default_factory=list)
    options: tuple[object, ...]
    names: tuple[str, ...]
    rule: Any
    offset: int
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)

    def active(self, states: Mapping[Tensor, dict[str, Any]]) -> list[Active]:
        """Return the parameters that have a gradient, with the state that is there. Host only."""
        each = zip(param_names(self.groups, self.offset), self.params, self.grads, strict=True)
        return [
            Active(index, name, p, grad, states.get(p, {}))
            for index, (name, p, grad) in enumerate(each)
            if grad is not None
        ]


def batches_of(step: GroupStep, active: Sequence[Active]) -> list[ParamBatch]:
    """Return what the kernels take together of a group, of its parameters with a gradient, their states complete.

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
    states, params = [one.state for one in active], [one.param for one in active]
    group = step.group
    orders, mode = [memory_order(param) for param in params], mode_of(params[0], group)
    is_random = mode == "stochastic" or moment_dtype(params[0], group) is torch.bfloat16
    weights = Weights(
        mode=mode,
        values=aligned(params, orders),
        aux=aligned([state[AUX_STATE[mode]] for state in states], orders) if mode in AUX_STATE else [],
        seeds=[param_seed(group["rounding_seed"], step.offset + one.index) if is_random else 0 for one in active],
        offsets=[global_offset(p) for p in params] if is_random and any_dtensor(params) else [],
        param_names=[one.name for one in active],
    )
    moments = {name: aligned([state[name] for state in states], orders) for name in step.names}
    step_counts, array = _bind_counts(states, params[0].device)
    return ParamBatch(
        indices=[one.index for one in active],
        orders=orders,
        needs_views=any(orders)
        or any([type(t) not in PLAIN or t.is_complex() for t in (*step.params, *[one.grad for one in active])]),
        weights=weights,
        moments=moments,
        step=step_counts,
        counts=array,
        layout=None if torch.compiler.is_compiling() else layout_of(weights, moments),
    )


def _bind_counts(states: Sequence[dict[str, Any]], device: torch.device) -> tuple[Tensor, Any]:
    """Return the step counts of some parameters as one vector, so that one addition counts a step for all, and the host's array that holds it, if any.

    Writes: the entry "step" of each state, which becomes an element of the vector. Syncs: no.
    """
    counts = [torch.as_tensor(state["step"], dtype=torch.float32, device=device).reshape(()) for state in states]
    is_hosts = device.type == "cpu" and not torch.compiler.is_compiling()
    array = numpy.empty(len(counts), numpy.float32) if is_hosts else None
    whole = torch.stack(counts) if array is None else torch.from_numpy(array).copy_(torch.stack(counts))
    for state, count in zip(states, whole.unbind(), strict=True):
        state["step"] = count
    return whole, array


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


def aligned(tensors: Sequence[Tensor], orders: Sequence[Order]) -> Sequence[Tensor]:
    """Return views of tensors of one dtype, dimensions reordered, complex ones as pairs of real numbers.

    Of sharded tensors the parts that lie on this rank. Syncs: no.
    """
    tensors = local_tensors(tensors)
    if any(orders):
        tensors = [t if order is None else t.permute(order) for t, order in zip(tensors, orders, strict=True)]
    return [torch.view_as_real(t) for t in tensors] if tensors and tensors[0].is_complex() else tensors
