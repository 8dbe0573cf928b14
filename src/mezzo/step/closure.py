"""Steps whose loss is computed in a closure: as often as the optimizer likes, or again at a smaller scale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import StepError
from ..optim.master_weights import parameters
from .decision import Decision
from .engine import Engine
from .flags import StepFlags
from .result import StepResult
from .update import Clip, OptimizerGrads, StepScaling, clamp_, handing

Closure = Callable[[], Tensor | float]


class _Void(Exception):
    """An evaluation met inf or NaN, so the optimizer's step is left where it is and taken back."""


class _Snapshot:
    """Weights and state of an optimizer before a step that may be left halfway; costs the memory of both."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = {p: p.detach().clone(memory_format=torch.preserve_format) for p in parameters(optimizer)}
        self._state: Mapping[str, Any] = copy.deepcopy(optimizer.state_dict())

    @torch.no_grad()
    def restore_(self) -> None:
        """Put everything back. Writes: weights and state."""
        for p, value in self._weights.items():
            p.copy_(value)
        self._optimizer.load_state_dict(dict(self._state))


class _Evaluations:
    """A closure as an optimizer calls it: every evaluation is judged, and hands over true gradients."""

    def __init__(self, engine: Engine, optimizer: Optimizer, closure: Closure, clip: Clip, orders: ExitStack) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._closure = closure
        self._clip = clip
        self._orders = orders
        self.last: tuple[list[OptimizerGrads], Decision, StepFlags] | None = None

    def __call__(self) -> Any:
        """Evaluate the closure.

        Raises:
            _Void: inf or NaN.
        """
        loss = self._closure()
        self.hand_over()
        return loss

    def hand_over(self) -> None:
        """Judge the gradients that are there and make them true ones. Syncs: once."""
        shares = self._engine.gradients.shares(self._optimizer)
        decision, verdict = self._engine.judge(shares)
        self.last = (shares, decision, verdict)
        if not verdict.facts().applied:
            raise _Void
        if self._clip.value is not None:
            clamp_(shares[0].grads, self._clip.value, decision.scale)
        coefficient = self._clip.coefficient(decision.norm)
        order = StepScaling(scale=decision.scale, coefficient=coefficient, skip=None)
        self._orders.close()
        self._orders.enter_context(handing(self._optimizer, shares[0].grads, order))
        self._engine.gradients.close()


def step_by_closure(engine: Engine, closure: Closure, optimizer: Optimizer | None, clip: Clip) -> StepResult:
    """Take a step whose loss a closure computes; see `Stepper.step`.

    An inf or NaN in any evaluation voids the whole step. With on_overflow="retry" the closure then runs again at the
    smaller scale, until the step is taken or the guard stops it.

    Raises:
        StepError: several optimizers and none named.
    """
    chosen = engine.optimizers if optimizer is None else (optimizer,)
    if len(chosen) != 1:
        raise StepError(
            f"step(closure) was given a closure for {len(chosen)} optimizers, which would evaluate it once each. "
            "Write amp.step(closure, optimizer=...)."
        )
    result = _attempt(engine, closure, chosen[0], clip)
    while engine.policy.guard.on_overflow == "retry" and result.reason == "gradients":
        engine.check()
        engine.gradients.zero(set_to_none=True)
        result = _attempt(engine, closure, chosen[0], clip)
    return result


def _attempt(engine: Engine, closure: Closure, optimizer: Optimizer, clip: Clip) -> StepResult:
    before = _Snapshot(optimizer)
    if engine.guard.may_stop:
        engine.replay.keep_closure(closure)
    with ExitStack() as orders, engine.stepping():
        evaluations = _Evaluations(engine, optimizer, closure, clip, orders)
        try:
            if engine.gradients.is_pending:
                evaluations.hand_over()
            optimizer.step(evaluations)
        except _Void:
            before.restore_()
    if evaluations.last is None:
        raise StepError(
            f"{type(optimizer).__name__}.step(closure) never called the closure. Write amp.step() without one."
        )
    shares, decision, verdict = evaluations.last
    return engine.settle(shares, decision, verdict, verdict.facts().skipped)
