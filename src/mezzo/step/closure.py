"""Steps whose loss is computed in a closure: as often as the optimizer likes, or again at a smaller scale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import StepError
from ..formats import describe
from ..loss_scale import StepScaling
from ..optim import MasterWeights, parameters
from .engine import Engine
from .grad_passes import clamp_
from .gradients import OptimizerGrads
from .result import StepFlags, StepResult
from .update import Clip, true_grads_for

Closure = Callable[[], Tensor | float]
_INSIDE = "Write in it amp.zero_grad(), the forward, amp.backward(loss), and at its end return loss."


class _Void(Exception):
    """An evaluation met inf or NaN, so the optimizer's step is left where it is and taken back."""


def _remember(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that gives an optimizer weights and state back after a step that was left halfway; it holds copies of both."""
    weights = {p: p.detach().clone(memory_format=torch.preserve_format) for p in parameters(optimizer)}
    state = copy.deepcopy(optimizer.state_dict())

    @torch.no_grad()
    def put_back() -> None:
        for p, value in weights.items():
            p.copy_(value)
        (optimizer.put_back if isinstance(optimizer, MasterWeights) else optimizer.load_state_dict)(state)

    return put_back


class _Evaluations:
    """A closure as an optimizer calls it: every evaluation is checked, and leaves true gradients."""

    def __init__(self, engine: Engine, optimizer: Optimizer, closure: Closure, clip: Clip, scope: ExitStack) -> None:
        self._engine, self._optimizer, self._closure, self._clip = engine, optimizer, closure, clip
        self._scope = scope
        self.loss: Any = 0.0
        self.last: tuple[list[OptimizerGrads], StepFlags[Any], StepResult] | None = None

    def __call__(self) -> Any:
        """Evaluate the closure; _Void for inf or NaN, a StepError if it made no gradients."""
        self.loss = self._closure()
        if not self._engine.gradients.is_pending:
            raise StepError(f"step(closure): the closure ended without amp.backward(loss). {_INSIDE}")
        self.unscale()
        consensus = self._engine.ranks.consensus  # an optimizer that compares losses must do so alike on all ranks
        return self.loss if consensus is None or self.loss is None else consensus.mean(self.loss)

    def unscale(self) -> None:
        """Check the gradients that are there and make them true ones. Syncs: once."""
        gradients = self._engine.gradients
        grads = gradients.collect(self._optimizer)
        self._engine.announce(self._optimizer, self._clip)
        scale = gradients.pending.scale
        flags, result = self._engine.check_grads(grads)
        self.last = (grads, flags, result)
        if not result.applied:
            raise _Void
        if self._clip.value is not None:
            clamp_(grads[0].grads, self._clip.value, scale)
        scaling = StepScaling(grad_scale=scale, clip_coef=self._clip.coefficient(flags.grad_norm))
        self._scope.close()
        self._scope.enter_context(true_grads_for(self._optimizer, grads[0].grads, scaling))
        gradients.close()

    def settle(self) -> None:
        """Close the step of the buffers, whose copies may find no memory. Writes: those of a void step. Syncs: yes."""
        if self.last is not None:
            _, flags, result = self.last
            self._engine.settle_buffers(flags, result.flags().skipped)


def step_by_closure(engine: Engine, closure: Closure, optimizer: Optimizer | None, clip: Clip) -> StepResult:
    """Take a step whose loss a closure computes; see `Stepper.step`.

    An inf or NaN in any evaluation voids the whole step. With on_overflow="retry" the closure then runs again at the
    smaller scale: until the step is taken, the guard stops the run, or it was tried guard.patience times.

    Raises: StepError: no function, or several optimizers and none named.
    """
    if isinstance(closure, Optimizer):
        raise StepError(
            f"step({type(closure).__name__}): what comes first is a closure. Write amp.step(optimizer=...)."
        )
    if not callable(closure):
        is_loss = isinstance(closure, Tensor) and closure.requires_grad
        meant = "amp.backward(loss), then amp.step()." if is_loss else "step(max_norm=...) to clip."
        raise StepError(f"step({describe(closure)}): what comes first is a closure. Write {meant}")
    chosen = engine.optimizers if optimizer is None else (optimizer,)
    if len(chosen) != 1:
        raise StepError(
            f"step(closure) was given a closure for {len(chosen)} optimizers, which would evaluate it once each. "
            "Write amp.step(closure, optimizer=...)."
        )
    for one in engine.stepped_options(chosen[0]):
        one.refuse_options(has_closure=True)
    guard = engine.policy.guard
    result = _try_once(engine, closure, chosen[0], clip)
    # The guard stops a run after that many; without it nothing else would.
    for _ in range(guard.patience - 1):
        if guard.on_overflow != "retry" or result.reason != "gradients":
            break
        engine.check()
        engine.gradients.zero(set_to_none=True)
        result = _try_once(engine, closure, chosen[0], clip)
    return result


def _evaluate_again(engine: Engine, optimizer: Optimizer, closure: Closure, scale: float) -> None:
    """Evaluate a closure as its step did, up to the evaluation that met inf or NaN, and take the step back.

    Writes: what it gives back. Syncs: at each evaluation.
    """
    put_back = _remember(optimizer)

    def evaluate() -> Any:
        loss = closure()
        grads = [p.grad for p in parameters(optimizer) if p.grad is not None]
        if not all(bool(g.isfinite().all()) for g in grads):
            raise _Void
        for grad in grads:
            grad.div_(scale)
        return loss

    try:
        with suppress(_Void), engine.stepping():
            optimizer.step(evaluate)
    finally:
        put_back()


def _try_once(engine: Engine, closure: Closure, optimizer: Optimizer, clip: Clip) -> StepResult:
    put_back = _remember(optimizer)
    if engine.guard.may_stop:
        engine.replay.keep_closure(partial(_evaluate_again, engine, optimizer, closure))
    with ExitStack() as scope, engine.stepping():
        evaluations = _Evaluations(engine, optimizer, closure, clip, scope)
        try:
            if engine.gradients.is_pending:
                evaluations.unscale()
            optimizer.step(evaluations)
            evaluations.settle()
        except _Void:
            put_back()
            evaluations.settle()
        except BaseException as error:
            put_back()
            if not isinstance(error, TypeError) or evaluations.loss is not None:
                raise
            raise StepError(
                f"step(closure): the closure returned None, and the optimizer reads its loss. {_INSIDE}"
            ) from error
    if evaluations.last is None:
        raise StepError(
            f"{type(optimizer).__name__}.step(closure) never called the closure. Write amp.step() without one."
        )
    grads, flags, result = evaluations.last
    engine.finish_step(grads, flags, result, result.flags().skipped)
    return result
