"""What the scaler says when it is misused: what was asked, what came, why not, what to write instead."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .._torch import gradient_hooks, is_fused
from ..errors import listed
from ..formats import describe
from ..policy import ScalingConfig
from .fused import param_names, parameters
from .state import LossScale
from .unscale import real_values

_log = logging.getLogger("mezzo.loss_scale")
_warned: WeakSet[Optimizer] = WeakSet()
SHOWN = 5
"""How many parameters a message names."""

EDITED = (
    "changed between backward() and unscale_(), while they were multiplied by the loss scale{which}. Clipping or "
    "editing scaled gradients, or adding those of a loss that was not scaled, gives wrong updates and hides overflow. "
    "Call scaler.unscale_(optimizer) before you touch gradients, and scale every loss; if the change keeps them "
    "scaled (an all-reduce, a division), call scaler.mark_scaled(optimizer) after it."
)
MIXED = "are the unscaled gradients of an earlier step with scaled ones added on top{which}. Call optimizer.zero_grad() before the backward passes of the next step."
TWICE = (
    "were already divided by the loss scale in this iteration{which}. They belong to two optimizers, or to an "
    "optimizer and the one it wraps. Give each parameter to one optimizer, and pass the same object to unscale_() and step()."
)
STALE = "are left over from an earlier step and were divided by the loss scale then{which}. Call optimizer.zero_grad() before the backward passes of the next step."
UNSEEN = (
    "did not come from a scaled loss, and would be divided by the loss scale all the same{which}. Write "
    "scaler.scale(loss).backward(); if you multiplied the loss by hand, call scaler.mark_scaled(optimizer) before this step."
)
ADDED = (
    "had scaled gradients added after unscale_(){which}. Finish every backward() before unscale_(optimizer); to give "
    "a step up, call scaler.update() and optimizer.zero_grad() before the next backward()."
)
DIRECT = (
    "are still multiplied by the loss scale, and {optimizer}.step() was called on them directly{which}. Call "
    "scaler.step(optimizer): it divides them first, and skips the step if they overflowed."
)

UNSCALED_TWICE = (
    "unscale_() was called twice for this {optimizer} since the last update(): its gradients would be divided by the "
    "loss scale twice. Call it once, after the last backward()."
)
UNSCALED_LATE = "unscale_() was called for this {optimizer} after step(). Call it between backward() and step(), and update() after step()."
STEPPED_TWICE = "step() was called twice for this {optimizer} since the last update(). Call scaler.update() once per iteration, after the last step()."
NO_LOSS = "scale() got a {kind} where a loss belongs. Pass a tensor, or lists, tuples, dicts or other iterables that hold nothing but tensors."
CLOSURE = (
    "step() got a closure, and a loss scaler cannot run one: the backward() inside would hand scaled gradients "
    "straight to the update. Call backward() before step(), or use mezzo.prepare(model, optimizer).step(closure=...)."
)


def names(optimizer: Optimizer) -> list[str]:
    """Return how messages call the parameters of an optimizer, in order: their names if it knows them.

    >>> names(torch.optim.SGD([torch.zeros(2, 3)]))
    ['parameter 0 (fp32[2,3] cpu)']
    """
    named = zip(param_names(optimizer.param_groups), parameters(optimizer), strict=True)
    return [f"{name} ({describe(param)})" for name, param in named]


def about(optimizer: Optimizer, indices: Sequence[int], verdict: str) -> str:
    """Return a verdict, one of the sentences above, on some gradients of an optimizer, with the parameters it concerns."""
    labels, kind = names(optimizer), type(optimizer).__name__
    count = f"{len(indices)} of the {len(labels)} gradients of this {kind}"
    which = f": {listed([labels[i] for i in indices], SHOWN)}"
    return f"{count} {verdict.format(which=which, optimizer=kind)}"


def half_gradients(optimizer: Optimizer) -> str:
    """Return the refusal of fp16 gradients, with the fp16 parameters of the optimizer."""
    named = zip(names(optimizer), parameters(optimizer), strict=True)
    half = [label for label, p in named if p.grad is not None and p.grad.dtype is torch.float16]
    total = sum(param.requires_grad for param in parameters(optimizer))
    remedy = (
        "This optimizer divides by itself, in fp32: leave unscale_() out, and clip with mezzo.prepare(model, optimizer).step(max_norm=...)."
        if is_fused(optimizer)
        else "Keep trainable weights in fp32 (module.float(); adapters too) and let the region cast them, or keep fp16 "
        'weights with fp32 masters: mezzo.prepare(model, optimizer, policy="fp16-master"), or '
        "mezzo.optim.MasterWeights(optimizer)."
    )
    return (
        f"unscale_() got fp16 gradients for {len(half)} of the {total} trainable parameters of this "
        f"{type(optimizer).__name__}: {listed(half, SHOWN)}. Dividing them in fp16 would flush to zero what scaling saved. {remedy}"
    )


def no_gradients(optimizer: Optimizer, passes: int, is_blind: bool) -> str:
    """Return which of four causes left every gradient of an optimizer empty; the rest as in `GradTracker`."""
    params = parameters(optimizer)
    start = f"step() found no gradient in any of the {len(params)} parameters of this {type(optimizer).__name__}: "
    if not any(param.requires_grad for param in params):
        return start + "all of them are frozen. Give the optimizer parameters with requires_grad=True."
    if passes:
        return start + (
            "backward() ran but reached none of them, or zero_grad() was called after it. Give the optimizer the parameters of the model "
            "that computed the loss, step it only in iterations that use them, and write zero_grad() before backward()."
        )
    if is_blind:
        return start + (
            "the scaled loss has no graph. It was detached, built by torch.tensor(...), or computed under no_grad()."
        )
    return start + "no scaled loss ran backward(). Write scaler.scale(loss).backward() before step()."


def exhausted(state: LossScale, config: ScalingConfig, patience: int | None, optimizers: Iterable[Optimizer]) -> str:
    """Return why scaling was given up, with the non-finite gradients of the last step. Syncs: yes."""
    if state.scale <= config.min_scale:
        why, knob = f"the loss scale is at its floor of {config.min_scale:g}", "GradScaler(min_scale=...)"
    else:
        why, knob = f"patience is {patience} (the loss scale is {state.scale:g})", "GradScaler(patience=...)"
    found = [finding for optimizer in optimizers for finding in nonfinite(optimizer)]
    where = f"Non-finite gradients: {listed(found, SHOWN)}. " if found else ""
    return (
        f"{state.skipped_in_a_row} steps in a row had inf or NaN gradients and {why}; no weight was changed by them. {where}"
        f"A loss scale can no longer be the cause: look for inf or NaN in the loss, the inputs, the weights and the buffers, or allow more with {knob}."
    )


def nonfinite(optimizer: Optimizer) -> list[str]:
    """Return the parameters whose gradients hold inf or NaN, with how many elements. Syncs: yes."""
    named = zip(names(optimizer), parameters(optimizer), strict=True)
    held = [(label, real_values(p.grad)) for label, p in named if p.grad is not None]
    counts = [(label, int((~values.isfinite()).sum()), values.numel()) for label, values in held]
    return [f"{label}: {count} of {numel}" for label, count, numel in counts if count]


def say_hooked(optimizer: Optimizer, known: Mapping[Tensor, str] | None = None) -> None:
    """Log, once for an optimizer, which of its gradients go through somebody's hooks while they carry the loss scale. Host only."""
    hooked = [] if optimizer in _warned else [p for p in parameters(optimizer) if _is_hooked(p)]
    if hooked:
        _warned.add(optimizer)
        labels = {**dict(zip(parameters(optimizer), names(optimizer), strict=True)), **(known or {})}
        _log.warning(
            "hooks on %s see gradients multiplied by the loss scale: what they clip, or compare with a number, is off by it, "
            "and the model may not train. Clip by amp.step(max_norm=...) or amp.step(clip_value=...), or after scaler.unscale_(optimizer), "
            "or multiply their numbers by the scale; what only copies, masks or averages needs no change.",
            listed([labels[p] for p in hooked]),
        )


def _is_hooked(param: Tensor) -> bool:
    hooks = [hook for found in gradient_hooks(param) for hook in (found or {}).values()]
    whose = [getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks]  # of a partial too
    return any([name.partition(".")[0] not in ("torch", "mezzo") for name in whose])
