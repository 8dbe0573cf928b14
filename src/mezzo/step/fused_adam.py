"""The step of torch's fused Adam and AdamW without the Python that torch has around their kernel: of small weights it takes as long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from .._torch import foreach_sub_, fused_adam_, fused_adamw_, is_capturing, is_unwatched, num_function_modes
from ..kernels import PLAIN, add_one_

_dtype, _device, _layout, _is_cpu = map(attrgetter, ("dtype", "device", "layout", "is_cpu"))


def step_(optimizer: Optimizer) -> object:
    """Take the step of an optimizer, of torch's own without the wrapper that names it in profiles: by the kernel alone where it does nothing else.

    Writes: weights and state. Syncs: no.
    """
    lists = _lists_of(optimizer) if type(optimizer) in (Adam, AdamW) else None
    if lists is None:
        return type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # as functools.wraps leaves it
    grad_mode = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        for group, held in zip(optimizer.param_groups, lists, strict=True):
            if held[0]:
                _update_(optimizer, group, *held)
    finally:
        torch.set_grad_enabled(grad_mode)
    return None


def _update_(
    optimizer: Any, group: dict[str, Any], params: list[Tensor], grads: list[Tensor],
    means: list[Tensor], squares: list[Tensor], counts: list[Tensor],
) -> None:  # fmt: skip
    """Do as `_fused_adam` of torch.optim does for tensors of one device and dtype."""
    scale, found_inf = _guards(optimizer)
    kernel: Any = fused_adamw_ if group["decoupled_weight_decay"] else fused_adam_  # overloaded by the kind of rate
    add_one_(counts)
    kernel(
        params, grads, means, squares, [], counts, beta1=group["betas"][0], beta2=group["betas"][1], amsgrad=False,
        grad_scale=scale, found_inf=found_inf, **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")},
    )  # fmt: skip
    if found_inf is not None:
        foreach_sub_(counts, [found_inf] * len(counts))


def _guards(optimizer: Any) -> tuple[Tensor | None, Tensor | None]:
    return getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)


def _lists_of(optimizer: Optimizer) -> list[list[list[Any]]] | None:
    """Return for each group the weights that have gradients, these, moments and step counts; None where torch does more than hand them to its kernel. Host only."""
    groups, state = optimizer.param_groups, optimizer.state
    if num_function_modes() or not is_unwatched() or not all(map(_is_plain, groups)):
        return None
    held = [[p for p in group["params"] if p.grad is not None] for group in groups]
    params = list(chain.from_iterable(held))
    is_whole = len(state) == len(params) and all(map(is_, state, params))  # a look-up by a tensor is a call of Python
    entries = iter(state.values() if is_whole else map(state.get, params))
    lists = []
    for own in held:
        of_own = list(islice(entries, len(own)))
        try:
            means, squares, counts = [[entry[name] for entry in of_own] for name in ("exp_avg", "exp_avg_sq", "step")]
        except (KeyError, TypeError):  # which the first step makes
            return None
        lists.append([own, [p.grad for p in own], means, squares, counts])
        if own and not _go_together(lists[-1], _guards(optimizer)):
            return None
    return lists


def _is_plain(group: dict[str, Any]) -> bool:
    others = ("amsgrad", "capturable", "differentiable")
    numbers = (group["lr"], *group["betas"])
    return group["fused"] is True and not any([group[name] for name in others]) and set(map(type, numbers)) == {float}


def _go_together(lists: Sequence[list[Any]], guards: Sequence[Tensor | None]) -> bool:
    """Whether one call of a kernel takes them all."""
    *tensors, counts = lists
    every = list(chain.from_iterable(tensors))
    device = every[0].device
    return (
        set(map(type, chain(every, counts))) <= set(PLAIN)
        and len(set(map(_dtype, every))) == 1
        and (all(map(_is_cpu, every)) or set(map(_device, every)) == {device})
        and set(map(_layout, tensors[1])) == {torch.strided}
        and all([guard is None or guard.device == device for guard in guards])
        and not is_capturing(device)
    )
