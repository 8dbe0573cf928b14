"""Checks gradients against what the tracker noted, before they are divided and before they are applied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from weakref import WeakSet

from torch import Tensor
from torch.optim.optimizer import Optimizer

from .._torch import gradient_hooks
from ..errors import ScalerError, listed
from ..stamp import Stamp
from . import messages
from .fused import parameters
from .grad_tracker import Entry, GradTracker, Mark
from .unscale import real_values

_log = logging.getLogger("mezzo.loss_scale")
_warned: WeakSet[Optimizer] = WeakSet()


def say_hooked(optimizer: Optimizer, known: Mapping[Tensor, str] | None = None) -> None:
    """Log, once for an optimizer, which of its gradients go through somebody's hooks while they carry the loss scale. Host only."""
    hooked = [] if optimizer in _warned else [p for p in parameters(optimizer) if _is_hooked(p)]
    if hooked:
        _warned.add(optimizer)
        labels = {**dict(zip(parameters(optimizer), messages.names(optimizer), strict=True)), **(known or {})}
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


def before_unscale(tracker: GradTracker, optimizer: Optimizer) -> bool:
    """Refuse gradients that are not exactly what backward passes of scaled losses left; return whether any is known to be scaled.

    Raises:
        ScalerError: a gradient was edited while scaled, is divided already, is left over, or was never scaled.

    Syncs: only where a gradient is suspicious, to see whether it is zero, or has the values it had, and so is harmless.
    """
    if not tracker.can_judge:
        return False
    tracker.note_running(optimizer)
    suspects: dict[str, list[int]] = {}
    unknown, is_scaled, params = [], False, parameters(optimizer)
    for index, param in enumerate(params):
        if (grad := param.grad) is None:
            continue
        entry = tracker.entry(param)
        if entry is not None and entry.mark is Mark.SCALED and entry.stamp.is_current(grad):
            is_scaled = True
        elif entry is not None and (verdict := _verdict(entry, grad, tracker.iteration)):
            suspects.setdefault(verdict, []).append(index)
        else:
            unknown.append(index)
    edited = suspects.pop(messages.EDITED, [])
    changed = [index for index in edited if not tracker.is_harmless(params[index])]
    is_scaled = is_scaled or len(changed) < len(edited)
    if changed:
        suspects[messages.EDITED] = changed
    for verdict, indices in suspects.items():
        # Zeroed gradients are harmless beside scaled ones; where none is left, NaN may have been edited to zero.
        _refuse(optimizer, indices, verdict, zeros_too=verdict is messages.EDITED and not is_scaled)
    if unknown and not is_scaled and not tracker.has_loose_ends and (tracker.passes == 0 or tracker.knows(optimizer)):
        _refuse(optimizer, unknown, messages.UNSEEN)
    return is_scaled


def _verdict(entry: Entry, grad: Tensor, iteration: int) -> str | None:
    if entry.mark is Mark.SCALED:
        return messages.EDITED
    if entry.mark is Mark.MIXED:
        return messages.MIXED if entry.stamp.is_of(grad) else None
    if entry.iteration == iteration:
        return messages.TWICE if entry.stamp.is_of(grad) else None
    return messages.STALE if entry.stamp.is_current(grad) else None


def before_step(tracker: GradTracker, optimizer: Optimizer) -> None:
    """Refuse to apply gradients that were divided and then had scaled ones added: a ScalerError. Syncs: only on the way to it."""
    if tracker.can_judge:
        _refuse(optimizer, _still_scaled(tracker, optimizer, Stamp.is_of), messages.ADDED)


def direct_step(tracker: GradTracker, optimizer: Optimizer) -> None:
    """Refuse a step that was not asked of the scaler, on gradients that are still scaled: a ScalerError. Syncs: only on the way to it."""
    if not tracker.is_stepping and tracker.can_judge:
        tracker.note_running(optimizer)
        _refuse(optimizer, _still_scaled(tracker, optimizer, Stamp.is_current), messages.DIRECT)


def _still_scaled(tracker: GradTracker, optimizer: Optimizer, is_noted: Callable[[Stamp, Tensor], bool]) -> list[int]:
    """Return the indices of the gradients that were not divided, of those that are the ones noted."""
    found = []
    for index, param in enumerate(parameters(optimizer)):
        entry, grad = tracker.entry(param), param.grad
        if entry is None or grad is None or entry.mark is Mark.UNSCALED:
            continue
        if is_noted(entry.stamp, grad):
            found.append(index)
    return found


def _refuse(optimizer: Optimizer, indices: list[int], verdict: str, zeros_too: bool = False) -> None:
    params = parameters(optimizer)
    if not zeros_too:
        indices = [i for i in indices if (grad := params[i].grad) is not None and bool(real_values(grad).any())]
    if indices:
        raise ScalerError(messages.about(optimizer, indices, verdict))
