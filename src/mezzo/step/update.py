"""The update: who may step, unscaling, clipping and stepping, decided on the device or, where that cannot be, by the host."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._torch import (
    STEP_WRAPPER,
    count_step,
    global_post_hooks,
    global_pre_hooks,
    graph_task_id,
    is_fused,
    profiler_enabled,
    step_hooks,
)
from ..errors import StepError, listed, shown
from ..formats import SMALLEST, is_number, number_of
from ..kernels import CLIP_EPS, choose
from ..loss_scale import AccumulationState, LossScale, StepScaling, can_move_in_place, handing, move_, next_state
from ..optim import check_finite, is_hooked, keeps_masters, parameters, wrapped_optimizer
from ..policy import ScalingConfig
from ..stamp import versions_of
from . import fused_adam
from .grad_passes import clamp_, multiply_
from .gradients import AFTER_BACKWARD, NOTHING, OptimizerGrads
from .ranks import option_lines
from .result import Skip, StepFlags
from .strangers import NO_SCALER, is_called_by_scaler
from .undo import Attempt, can_be_undone

_handles: weakref.WeakKeyDictionary[Optimizer, tuple[RemovableHandle, weakref.ref[Any]]] = weakref.WeakKeyDictionary()
_whole: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""How many weights had gradients, and how many had state, in the last step of an optimizer that came to its end."""
_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
"""Options that schedules move, alike on all ranks; others may be what an optimizer found out of its own shards."""


class _Steps(Protocol):
    is_stepping: bool

    @property
    def scale(self) -> Tensor | None: ...


def is_owned(optimizer: Optimizer) -> bool:
    """Whether a stepper that lives takes the steps of an optimizer."""
    return optimizer in _handles and _handles[optimizer][1]() is not None


def forbid_direct_steps(optimizer: Optimizer, engine: _Steps, stepper: object) -> None:
    """Have an optimizer refuse `step()` unless a stepper's engine calls it, for as long as the engine lives.

    An optimizer that is prepared again belongs to the new stepper.
    """
    reference = weakref.ref(engine)

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        engine = reference()
        if engine is not None and not engine.is_stepping and not _only_makes_state(optimizer):
            in_order = "Write amp.step()." if graph_task_id() == -1 else AFTER_BACKWARD
            advice = NO_SCALER if is_called_by_scaler() else in_order
            past = "the guard" if engine.scale is None else "the guard and on gradients that may carry the loss scale"
            raise StepError(f"{type(optimizer).__name__}.step() was called directly, past {past}. {advice}")

    allow_direct_steps(optimizer)
    _handles[optimizer] = optimizer.register_step_pre_hook(refuse), weakref.ref(stepper)


def _only_makes_state(optimizer: Optimizer) -> bool:
    """Whether a step would make state where there is none and move nothing, as `torch.distributed.checkpoint.state_dict` takes one. Syncs: yes."""
    if optimizer.state or any(
        torch.any(torch.as_tensor(group.get("lr", 1.0)) != 0) for group in optimizer.param_groups
    ):
        return False
    return not any(p.grad is not None and bool(p.grad.any()) for p in parameters(optimizer))


def allow_direct_steps(optimizer: Optimizer) -> None:
    """Let an optimizer step again whoever calls it. Writes: its hooks."""
    if optimizer in _handles:
        _handles.pop(optimizer)[0].remove()


def decides_on_device(optimizer: Optimizer) -> bool:
    """Whether a step can be left out, or undone, on the device, so that the host need not know. Host only.

    Not if there are hooks, which would run after steps that did not happen.
    """
    # The global hooks of torch.profiler and of mezzo's cache only take note; anybody else's may count steps.
    everywhere = (*global_pre_hooks.values(), *global_post_hooks.values())
    if any([hook.__module__.partition(".")[0] not in ("torch", "mezzo") for hook in everywhere]):
        return False
    for part in (optimizer, wrapped_optimizer(optimizer)):
        pre, post = step_hooks(part)
        if post or len(pre) > 1:  # one pre-hook is the stepper's or the wrapper's own
            return False
    return not _needs_undoing(optimizer) or can_be_undone(optimizer)


def _needs_undoing(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes each step it is told to, whatever was found. Host only."""
    inner = wrapped_optimizer(optimizer)
    return not is_fused(inner) or _lacks_momentum(inner, optimizer)


class SteppedOptions:
    """An optimizer, its index among the prepared ones, and its options as they were when somebody last looked at them."""

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        self.optimizer, self.index = optimizer, index
        self._kind: Any = type(wrapped_optimizer(optimizer))
        self._options: list[object] = []
        self._lines: tuple[str, ...] = ()

    def refuse_options(self, *, has_closure: bool) -> None:
        """Refuse a step without the closure that it needs, and options that were set, since the last one, to inf or NaN. Host only.

        Raises:
            StepError: the optimizer evaluates the loss by itself, and has no closure.
            ConfigError: a rate, decay, eps, momentum or beta is inf or NaN; nothing was changed.
        """
        if not has_closure and needs_closure(self._kind):
            raise StepError(
                f"step() was called without a closure, and {self._kind.__name__} computes the loss several times in one step. "
                "Write amp.step(closure), where closure calls amp.zero_grad(), the model and amp.backward(loss), and returns the loss."
            )
        options = [value for group in self.optimizer.param_groups for value in group.values()]
        if len(options) != len(self._options) or not all(map(is_, options, self._options)):
            for group in self.optimizer.param_groups:
                check_finite(self.optimizer, group)
            self._options, self._lines = options, ()

    def lines(self) -> tuple[str, ...]:
        """Return what the optimizer's options were when `refuse_options` last looked, as the ranks compare them. Host only."""
        self._lines = self._lines or tuple(option_lines(self.optimizer, _SCHEDULED))
        return self._lines


@functools.cache
def needs_closure(kind: type[Optimizer]) -> bool:
    """Whether a kind of optimizer evaluates the loss by itself, as LBFGS and SAM do."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _lacks_momentum(optimizer: Optimizer, owner: Optimizer) -> bool:
    """Whether torch's fused SGD has yet to make momentum buffers: skipping that step leaves them without values (torch 2.13)."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    params = [p for group in optimizer.param_groups if group["momentum"] != 0 for p in group["params"]]
    state = owner.state if params else {}
    return any(state.get(p, {}).get("momentum_buffer") is None for p in params if p.grad is not None)


def clip_bound_of(top: Any) -> Any:
    """Return the number that gradients are to be clipped to, out of whatever holds one; anything else, and a flag, as it is. Syncs: for a tensor."""
    return top if isinstance(top, float | bool | None) else number_of(top)


NO_BOUND = "gradients are clipped to a positive number that fp32 holds; write one"


def is_bound(top: Any) -> bool:
    """Whether gradients can be clipped to this: a positive number, inf for one; no flag. Syncs: for a tensor, once."""
    return is_number(clip_bound_of(top), SMALLEST, math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """How gradients are clipped: to at most an L2 norm, or to a value in both directions; None: not. A StepError for both, or one that is not positive."""

    max_norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and self.value is not None:
            raise StepError(
                f"step(max_norm={self.max_norm}, clip_value={self.value}): clip by norm or by value, not both."
            )
        for name, top in (("max_norm", self.max_norm), ("clip_value", self.value)):
            if top is not None and not is_bound(top):
                raise StepError(f"step({name}={shown(top)}): {NO_BOUND}, or None.")

    def spelled(self) -> list[str]:
        """Return what was asked for, as arguments. Host only."""
        given = (("max_norm", self.max_norm), ("clip_value", self.value))
        return [f"{name}={float(top)}" for name, top in given if top is not None]

    def coefficient(self, norm: Tensor | float) -> Tensor | None:
        """Return what brings gradients of a true norm down to `max_norm`: shape (), fp32, at most 1. Syncs: no."""
        if self.max_norm is None:
            return None
        norm = norm if isinstance(norm, Tensor) else torch.tensor(float(norm), dtype=torch.float32, device="cpu")
        return (self.max_norm / (norm + CLIP_EPS)).clamp(max=1.0)


@contextmanager
def true_grads_for(optimizer: Optimizer, grads: Sequence[Tensor], scaling: StepScaling) -> Iterator[None]:
    """Have an optimizer find true gradients inside the block, in which it steps.

    Those of mezzo and torch's fused ones read scale, clipping and skipping by themselves; for any other the
    gradients are unscaled and clipped in place, and whether it may step is decided already.

    Writes: attributes of the optimizer for the length of the block, or the gradients. Syncs: no.
    """
    if not is_fused(optimizer):
        factor = _factor(scaling)
        if factor is not None:
            multiply_(grads, factor)
        yield
        return
    scale, coefficient = scaling.grad_scale, scaling.clip_coef
    if coefficient is not None and not keeps_masters(optimizer):
        # torch's fused kernels know one divisor.
        divisor = scaling.divisor
        if divisor is None:
            divisor = coefficient.reciprocal() if scale is None else scale / coefficient
        scaling = StepScaling(grad_scale=divisor, found_inf=scaling.found_inf)
    with handing(optimizer, scaling):
        yield


def bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return an optimizer's step, of torch's own without what torch has around it where nobody looks there.

    That takes as long as the update of a small model. Of other hooks there is the stepper's alone, which asks who steps.
    """
    is_wrapped = getattr(type(optimizer).step, "__code__", None) is STEP_WRAPPER
    if not is_wrapped or profiler_enabled() or torch.compiler.is_compiling() or is_hooked(optimizer):
        return optimizer.step
    return partial(fused_adam.step_, optimizer) if count_step(optimizer) else optimizer.step


def _factor(scaling: StepScaling) -> Tensor | None:
    if scaling.grad_scale is None:
        return scaling.clip_coef
    inverse = scaling.grad_scale.reciprocal()
    return inverse if scaling.clip_coef is None else inverse * scaling.clip_coef


def update_(
    grads: Sequence[OptimizerGrads],
    flags: StepFlags[Any],
    pending: AccumulationState,
    skipped: Sequence[float] | None,
    clip: Clip,
    skip: Skip,
) -> list[Callable[[], None] | None]:
    """Have each optimizer take its step, or leave everything as it is; return for each what must be called once the host knows that it skips.

    Where the host does not know who `skipped`, the optimizers decide on the device. With `skip` "independent" the gradients of each are
    clipped by their own norm. `pending` takes note if the step ends halfway.

    Raises:
        StepError: an optimizer raised after another one had taken its step.

    Writes: weights and state, and the gradients of some. Syncs: no.
    """
    scale = pending.scale
    params = [p for one in grads for p in one.params] if scale is not None and len(grads) > 1 else []
    is_divided = len(set(params)) < len(params)  # some are shared
    if clip.value is not None:
        clamp_([grad for one in grads for grad in one.grads], clip.value, scale)
    if scale is not None and is_divided:
        # An optimizer that divides in place would do so for the next one too.
        multiply_([grad for one in grads for grad in one.grads], scale.reciprocal())
        scale = None
    taken: list[OptimizerGrads] = []
    undo: list[Callable[[], None] | None] = [None] * len(grads)
    for i, one in enumerate(grads):
        if skipped is not None and skipped[i]:
            continue
        norm = flags.norms[i] if skip == "independent" else flags.grad_norm
        coefficient = flags.clip_coefs[i] if flags.clip_coefs else clip.coefficient(norm)
        divisor = flags.divisors[i] if flags.divisors and scale is pending.scale else None
        found_inf = flags.skipped[i] if skipped is None else None
        scaling = StepScaling(grad_scale=scale, clip_coef=coefficient, found_inf=found_inf, divisor=divisor)
        try:
            counts = len(one.params), len(one.optimizer.state)
            with NOTHING if _whole.get(one.optimizer) == counts else _whole_state(one.optimizer, one.params):
                undo[i] = _step_one(one, scaling)
            _whole[one.optimizer] = counts[0], len(one.optimizer.state)
        except BaseException as failure:
            _note_failure(pending, failure, one, taken, grads, is_edited=is_divided or clip.value is not None)
            raise
        taken.append(one)
    return undo


def _note_failure(
    pending: AccumulationState, failure: BaseException, one: OptimizerGrads, taken: Sequence[OptimizerGrads],
    grads: Sequence[OptimizerGrads], *, is_edited: bool,
) -> None:  # fmt: skip
    """Take note of what a step that failed has left behind; a StepError where another optimizer had taken its own. Host only."""
    if taken:
        pending.broken = f"a step() that ended halfway: {_names(taken)} took its step"
        if isinstance(failure, Exception):
            raise StepError(
                f"step() ended halfway: {_names(taken)} took its step, and {_names([one])} raised {type(failure).__name__}: {failure}. Call amp.zero_grad() "
                "and go on with the next batch, or load the last checkpoint."
            ) from failure
    elif isinstance(failure, Exception):
        is_whole = all(is_fused(o.optimizer) and wrapped_optimizer(o.optimizer) is o.optimizer for o in grads)
        has_post_hooks = any(step_hooks(part)[1] for part in (one.optimizer, wrapped_optimizer(one.optimizer)))
        pending.broken = _CHANGED if is_edited or not is_whole else _HOOKED if has_post_hooks else ""


def _step_one(one: OptimizerGrads, scaling: StepScaling) -> Callable[[], None] | None:
    """Have an optimizer take its step, unless `found_inf` says no; return what must be called once the host knows that. Syncs: no."""
    attempt = None
    if scaling.found_inf is not None and _needs_undoing(one.optimizer):
        attempt = Attempt(one.optimizer, one.params, scaling.found_inf)
        scaling = replace(scaling, found_inf=None)
    is_bare = scaling.grad_scale is scaling.clip_coef is scaling.found_inf is None
    try:
        if is_bare and getattr(one.optimizer, "grad_scale", None) is None:
            bare_step(one.optimizer)()
        else:
            with true_grads_for(one.optimizer, one.grads, scaling):
                bare_step(one.optimizer)()
    except BaseException:
        if attempt is not None and (take_back := attempt.finish(has_failed=True)) is not None:
            take_back()
        raise
    return None if attempt is None else attempt.finish()


@contextmanager
def _whole_state(optimizer: Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Take back, where the step inside the block fails, the state it made anew of weights that it had not written: half of an entry would fail every step to come. Host only."""
    state, versions = optimizer.state, versions_of(params)
    kept = [set(entry) if isinstance(entry := state.get(p), dict) else None for p in params]
    try:
        yield
    except BaseException:
        for p, names, before, now in zip(params, kept, versions, versions_of(params), strict=True):
            if before == now and isinstance(entry := state.get(p), dict):
                for name in entry.keys() - (names or ()):
                    del entry[name]
                if names is None:
                    del state[p]
        raise


UNFINISHED = "a step() that has not ended, or was interrupted and may have been taken in part"
_CHANGED = "a step() that failed, when gradients had been divided or clipped already, or weights written"
_HOOKED = "a step() that failed, perhaps in a hook after weights had been written"


def _names(grads: Sequence[OptimizerGrads]) -> str:
    return listed([f"{type(one.optimizer).__name__} (optimizer {one.index})" for one in grads])


def move_scale_(state: LossScale, flags: StepFlags[Any], config: ScalingConfig) -> None:
    """Move the loss scale after a step; leave it where it was not to blame.

    The state is written in place, so that a captured CUDA graph finds in each replay what the last one left.

    Writes: `state`. Syncs: no.
    """
    vector = flags.vector
    in_one_launch = None if vector is None else choose("decision", vector.device, torch.float32).module.move_scale_
    if in_one_launch is not None:
        ceiling = math.inf if config.max_scale is None else config.max_scale
        numbers = (config.growth_factor, config.backoff_factor, config.min_scale, ceiling)
        in_one_launch(vector, state, *numbers, config.growth_interval, config.hysteresis, dynamic=config.dynamic)
        return
    if not flags.is_known and can_move_in_place(config):
        bad = flags.gradients_bad
        found = torch.gt(bad, flags.loss_bad, out=torch.empty_like(bad))
        move_(state, found, torch.maximum(torch.as_tensor(flags.void), bad), config)
        return
    blameless = (flags.loss_bad != 0) | ((flags.buffers_bad != 0) & (flags.gradients_bad == 0))
    if blameless is True:
        return
    if flags.is_known:
        state.write_(next_state(state.numbers(), flags.gradients_bad, config))
        return
    moved = next_state(state, flags.gradients_bad, config)
    chosen = {f.name: torch.where(blameless, getattr(state, f.name), getattr(moved, f.name)) for f in fields(state)}
    state.write_(LossScale(**chosen))
